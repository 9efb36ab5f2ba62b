"""Jobs that are told to end while they train: all ranks save at one step, and go on from there."""

import signal
import subprocess
from pathlib import Path

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


@pytest.mark.parametrize("killed", [False, True], ids=["", "the coordinator is killed meanwhile"])
def test_a_signal_to_one_agent_saves_all_ranks_at_one_step(tmp_path: Path, killed: bool):
    with Coordinator(tmp_path) as coordinator:
        with job(coordinator.endpoint, tmp_path, RANKS) as (first, *_):
            until(lambda: len(steps(tmp_path, "began")) == RANKS, (tmp_path / "agents.log").read_text)
            if killed:
                coordinator.kill()
            first.send_signal(signal.SIGTERM)
            if killed:
                coordinator.start()
            # The other agents wait for the first one: torch's exit barrier lasts for 300 s.
            until(lambda: coordinator.log("save.done"), lambda: (tmp_path / "agents.log").read_text())
            assert first.wait(PATIENCE) != 0
        saved = steps(tmp_path, "saved")
        assert len(saved) == RANKS
        assert len(set(saved)) == 1
        last = CheckpointDirectory(tmp_path / "checkpoints").latest()
        assert last is not None
        assert last.step == saved[0]
        (done,) = coordinator.logged("save.done")
        assert f"was done by all ranks at step {saved[0]}" in done["reason"]

        # Another run of it goes on from there, and is asked from outside.
        with job(coordinator.endpoint, tmp_path, RANKS, run="again") as agents:
            until(lambda: len(steps(tmp_path, "began")) == 2 * RANKS, (tmp_path / "agents.log").read_text)
            assert steps(tmp_path, "began").count(saved[0]) == RANKS
            result = muster(coordinator, "save", "again", "--stop", f"--wait={PATIENCE}", "--reason=a drain")
            assert result.returncode == 0, result.stderr
            assert "done by all ranks" in result.stdout
            assert [agent.wait(PATIENCE) for agent in agents] == [0] * RANKS
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
