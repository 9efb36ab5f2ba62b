"""Jobs that are told to end while they train: all ranks save at one step, and go on from there."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from muster.worker.saves.directory import CheckpointDirectory
from tests.support.coordinator import MUSTER, Coordinator
from tests.support.patience import PATIENCE, until

PROGRAM = Path(__file__).parent.parent / "support" / "drained.py"
AGENTS, PER_NODE = 2, 2
RANKS = AGENTS * PER_NODE


@contextmanager
def job(
    coordinator: Coordinator, folder: Path, mode: str = "point", run: str = "job"
) -> Iterator[list[subprocess.Popen[str]]]:
    """torchrun's agents with their workers."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=muster", f"--rdzv-id={run}"),
        *(f"--rdzv-endpoint={coordinator.endpoint}", f"--nnodes={AGENTS}", f"--nproc-per-node={PER_NODE}"),
        *("--local-addr=127.0.0.1", str(PROGRAM), str(folder), mode),
    ]
    with (folder / "agents.log").open("a") as log:
        agents = [
            subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                text=True,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{PATIENCE:.0f}"},
            )
            for _ in range(AGENTS)
        ]
    try:
        yield agents
    finally:
        for agent in agents:
            agent.terminate()
        for agent in agents:
            agent.wait(PATIENCE)


def steps(folder: Path, what: str) -> list[int]:
    """At which steps ranks did something, in order of rank."""
    found = []
    for rank in range(RANKS):
        path = folder / f"rank-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        found += [int(line.split()[1]) for line in lines if line.split()[0] == what]
    return found


def muster(coordinator: Coordinator, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(MUSTER), *arguments, f"--endpoint={coordinator.endpoint}", f"--timeout={PATIENCE}"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("killed", [False, True], ids=["", "the coordinator is killed meanwhile"])
def test_a_signal_to_one_agent_saves_all_ranks_at_one_step(tmp_path: Path, killed: bool):
    with Coordinator(tmp_path) as coordinator:
        with job(coordinator, tmp_path) as (first, _):
            until(lambda: len(steps(tmp_path, "began")) == RANKS, (tmp_path / "agents.log").read_text)
            if killed:
                coordinator.kill()
            first.send_signal(signal.SIGTERM)
            if killed:
                coordinator.start()
            # The other agent waits for the first one: torch's exit barrier lasts for 300 s.
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
        with job(coordinator, tmp_path, run="again") as agents:
            until(lambda: len(steps(tmp_path, "began")) == 2 * RANKS, (tmp_path / "agents.log").read_text)
            assert steps(tmp_path, "began").count(saved[0]) == RANKS
            result = muster(coordinator, "save", "again", "--stop", f"--wait={PATIENCE}", "--reason=a drain")
            assert result.returncode == 0, result.stderr
            assert "done by all ranks" in result.stdout
            assert [agent.wait(PATIENCE) for agent in agents] == [0] * AGENTS
        assert len(set(steps(tmp_path, "saved"))) == 2


def test_a_job_that_saves_on_the_signal_alone_tears(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator, job(coordinator, tmp_path, "alone") as (first, second):
        until(lambda: len(steps(tmp_path, "began")) == RANKS, (tmp_path / "agents.log").read_text)
        first.send_signal(signal.SIGTERM)
        first.wait(PATIENCE)
        # Its peers are gone, so the other agent's ranks fail, without having saved.
        second.terminate()
        second.wait(PATIENCE)
        assert len(steps(tmp_path, "saved")) < RANKS


def test_what_is_withdrawn_is_not_done_and_a_viewer_sees_it(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator, job(coordinator, tmp_path):
        until(lambda: len(steps(tmp_path, "began")) == RANKS, (tmp_path / "agents.log").read_text)
        assert muster(coordinator, "save", "job", "--cancel").returncode == 5
        assert muster(coordinator, "save", "nobody").returncode == 1
        result = muster(coordinator, "save", "job", f"--wait={PATIENCE}", "--reason=an upgrade")
        assert result.returncode == 0, result.stderr
        shown = muster(coordinator, "describe", "run", "job").stdout
        assert "Save:" in shown
        assert "an upgrade" in shown
        assert "done by all ranks" in coordinator.get("/runs/job")[1]
