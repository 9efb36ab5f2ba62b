"""Jobs that are told to end while they train: all ranks save at one step, and go on from there."""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from lab.drain import job, reported_steps
from lab.patience import PATIENCE, until
from lab.processes import fork_client
from lab.processes.coordinator import MUSTER, Coordinator
from muster.checkpoint.directory import CheckpointDirectory
from muster.v1 import run_pb2, run_pb2_grpc

RANKS = 4


def steps(folder: Path, what: str) -> list[int]:
    return reported_steps(folder, RANKS, what)


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
        # The ranks had as long as torchrun gives them after the signal.
        left = steps(tmp_path, "left")
        assert len(left) == RANKS
        assert all(0 < one <= PATIENCE * 1000 for one in left)
        assert " STOPPED " in muster(coordinator, "get", "runs").stdout
        assert "Stopped at step" in coordinator.get("/runs/job")[1]
        # A late request, such as that of a batch script, does not concern the next generation of the job.
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


def test_ranks_know_their_node_and_how_long_they_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_NODE_NAME", "ip-10-0-0-1.internal")
    log = tmp_path / "agents.log"
    with Coordinator(tmp_path) as coordinator, job(coordinator.endpoint, tmp_path, RANKS) as agents:
        until(lambda: len(steps(tmp_path, "began")) == RANKS, log.read_text)
        with grpc.insecure_channel(coordinator.endpoint) as channel:
            stub = run_pb2_grpc.RunServiceStub(channel)
            ask = run_pb2.RequestSaveRequest(run_id="job", by="ann", deadline_ms=600_000)
            assert stub.RequestSave(ask, timeout=PATIENCE).save.HasField("deadline")
            until(lambda: coordinator.log("save.done"), log.read_text)
            left = steps(tmp_path, "left")
            assert len(left) == RANKS
            assert all(0 < one <= 600_000 for one in left)
            assert re.search(r"asked for by ann; \d+ s left", log.read_text())

            drain = run_pb2.DrainNodeRequest(node_name="pod-0", stop=True, by="ann", deadline_ms=300_000)
            assert not stub.DrainNode(drain, timeout=PATIENCE).runs
            drain.node_name = "ip-10-0-0-1.internal"
            (drained,) = stub.DrainNode(drain, timeout=PATIENCE).runs
            assert drained.run_id == "job"
        assert [agent.wait(PATIENCE) for agent in agents] == [STOPPED] * RANKS, log.read_text()
        left = steps(tmp_path, "left")
        assert len(left) == 2 * RANKS
        assert sum(one <= 300_000 for one in left) == RANKS


def test_save_that_a_stuck_rank_holds_up_names_it_and_is_made_when_it_goes_on(tmp_path: Path):
    with (
        Coordinator(tmp_path) as coordinator,
        job(coordinator.endpoint, tmp_path, RANKS, "stuck") as agents,
    ):
        log = tmp_path / "agents.log"
        until(lambda: steps(tmp_path, "stuck"), log.read_text)
        result = muster(coordinator, "save", "job", "--stop", "--deadline=2", "--wait=4")
        assert result.returncode == 4, result.stderr
        (late,) = coordinator.logged("save.late")
        for text in (result.stderr, late["reason"], muster(coordinator, "describe", "run", "job").stdout):
            assert "rank 1 " in text
            assert "main thread in hang, drained.py:" in text
        assert not steps(tmp_path, "saved")
        (tmp_path / "gate").touch()
        assert [agent.wait(PATIENCE) for agent in agents] == [STOPPED] * RANKS, log.read_text()
        assert len(set(steps(tmp_path, "saved"))) == 1


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


def test_cancel_without_a_save_fails_and_a_done_save_is_shown_in_cli_and_web_page(tmp_path: Path):
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
