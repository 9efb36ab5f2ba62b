"""Jobs that are told to end while they train: all ranks save at one step, and go on from there."""

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lab.drain import job, told
from lab.patience import PATIENCE, until
from lab.processes import fork_client
from lab.processes.coordinator import MUSTER, Coordinator
from muster.checkpoint.directory import CheckpointDirectory

RANKS = 4


def steps(folder: Path, what: str) -> list[int]:
    return told(folder, RANKS, what)


def muster(coordinator: Coordinator, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(MUSTER), *arguments, f"--endpoint={coordinator.endpoint}", f"--timeout={PATIENCE}"]
    return fork_client.run(command, timeout=2 * PATIENCE)


STOPPED = 75
"""The exit code of agents of a stopped run."""


def runs(coordinator: Coordinator) -> dict[str, Any]:
    """The run, as ``muster get runs`` shows it."""
    (run,) = json.loads(muster(coordinator, "get", "runs", "-o", "json").stdout)["runs"]
    return dict(run)


@pytest.mark.parametrize("killed", [False, True], ids=["", "the coordinator is killed meanwhile"])
def test_stopped_job_exits_with_75_and_resumes_under_its_run_id(tmp_path: Path, killed: bool):
    with Coordinator(tmp_path) as coordinator:
        with job(coordinator.endpoint, tmp_path, RANKS) as agents:
            until(lambda: len(steps(tmp_path, "began")) == RANKS, (tmp_path / "agents.log").read_text)
            if killed:
                coordinator.kill()
            agents[0].send_signal(signal.SIGTERM)
            if killed:
                coordinator.start()
            until(lambda: coordinator.log("save.done"), lambda: (tmp_path / "agents.log").read_text())
            # torch's exit barrier would wait for 300 s for the agent that the signal has ended.
            codes = [agent.wait(PATIENCE) for agent in agents]
            assert codes == [STOPPED] * RANKS, (tmp_path / "agents.log").read_text()
        saved = steps(tmp_path, "saved")
        assert len(saved) == RANKS
        assert len(set(saved)) == 1
        last = CheckpointDirectory(tmp_path / "checkpoints").latest()
        assert last is not None
        assert last.step == saved[0]
        (done,) = coordinator.logged("save.done")
        assert f"was done by all ranks at step {saved[0]}" in done["reason"]
        assert coordinator.logged("run.stopped")
        assert not coordinator.log("run.closed")
        assert runs(coordinator)["stopped"]["step"] == str(saved[0])
        assert " STOPPED " in muster(coordinator, "get", "runs").stdout
        assert "Stopped at step" in coordinator.get("/runs/job")[1]
        # A late request, such as that of a batch script, does not concern the next life of the job.
        late = muster(coordinator, "save", "job", "--stop", f"--wait={PATIENCE}")
        assert "done by all ranks" in late.stdout

        with job(coordinator.endpoint, tmp_path, RANKS) as agents:
            until(lambda: len(steps(tmp_path, "began")) == 2 * RANKS, (tmp_path / "agents.log").read_text)
            assert steps(tmp_path, "began").count(saved[0]) == RANKS
            assert "stopped" not in runs(coordinator)
            result = muster(coordinator, "save", "job", "--stop", f"--wait={PATIENCE}", "--reason=a drain")
            assert result.returncode == 0, result.stderr
            assert "done by all ranks" in result.stdout
            assert [agent.wait(PATIENCE) for agent in agents] == [STOPPED] * RANKS
        assert len(set(steps(tmp_path, "saved"))) == 2


def test_a_job_that_saves_on_the_signal_alone_tears(tmp_path: Path):
    with (
        Coordinator(tmp_path) as coordinator,
        job(coordinator.endpoint, tmp_path, RANKS, "alone") as (first, *others),
    ):
        until(lambda: len(steps(tmp_path, "began")) == RANKS, (tmp_path / "agents.log").read_text)
        first.send_signal(signal.SIGTERM)
        first.wait(PATIENCE)
        # Its rank is gone, so the others fail, without having saved.
        for agent in others:
            agent.terminate()
            agent.wait(PATIENCE)
        assert len(steps(tmp_path, "saved")) < RANKS


def test_what_is_withdrawn_is_not_done_and_a_viewer_sees_it(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator, job(coordinator.endpoint, tmp_path, RANKS):
        until(lambda: len(steps(tmp_path, "began")) == RANKS, (tmp_path / "agents.log").read_text)
        assert muster(coordinator, "save", "job", "--cancel").returncode == 5
        assert muster(coordinator, "save", "nobody").returncode == 1
        result = muster(coordinator, "save", "job", f"--wait={PATIENCE}", "--reason=an upgrade")
        assert result.returncode == 0, result.stderr
        shown = muster(coordinator, "describe", "run", "job").stdout
        assert "Save:" in shown
        assert "an upgrade" in shown
        assert "done by all ranks" in coordinator.get("/runs/job")[1]
