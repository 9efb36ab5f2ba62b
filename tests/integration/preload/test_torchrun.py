"""torchrun's workers start from the agent's fork server, round after round."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from lab.patience import until
from lab.processes.agents import PROGRAM, Job, Worker
from lab.processes.coordinator import Coordinator
from tests.integration.preload.launchers import LAUNCHER

MODULES = ("torch", "torch.distributed", "muster.worker.barriers")
IMPORTED = f"""
import sys
print("preloaded:", {set(MODULES)} <= sys.modules.keys())
"""


@pytest.fixture
def job(coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job of two ranks on each node, which say whether they have to import torch themselves."""
    monkeypatch.setenv("PYTHON_EXEC", LAUNCHER)
    monkeypatch.setenv("MUSTER_PRELOAD", ",".join(MODULES))
    return Job(tmp_path, coordinator.endpoint, program=IMPORTED + PROGRAM, ranks=2)


def parents(workers: list[Worker]) -> set[int]:
    return {worker.agent for worker in workers}


def test_workers_of_each_round_come_from_one_fork_server(job: Job):
    with job:
        agent = job.agent("1")
        first = job.round(2)
        server = psutil.Process(next(iter(parents(first))))
        assert server.ppid() == agent.process.pid
        os.kill(first[0].pid, signal.SIGKILL)
        second = job.round(2, after=first[0].round)
        assert parents(first) == parents(second) == {server.pid}
        job.finish()
        assert agent.wait() == 0, job.said()
        until(lambda: not server.is_running())
    said = job.said()
    assert said.count("preloaded: True") == 4
    assert said.count("muster-python:") == said.count("muster-python: preloaded torch") == 1
    assert f"(pid: {first[0].pid})" not in said  # torchrun knows the launcher, which ends by the same signal.
    assert "exitcode: -9" in said


def test_workers_import_by_themselves_after_their_fork_server_is_killed(job: Job):
    with job:
        agent = job.agent("1")
        first = job.round(2)
        os.kill(next(iter(parents(first))), signal.SIGKILL)
        second = job.round(2, after=first[0].round)
        assert {psutil.Process(one.pid).ppid() for one in second} == {agent.process.pid}
        job.finish()
        assert agent.wait() == 0, job.said()
    said = job.said()
    assert (said.count("preloaded: True"), said.count("preloaded: False")) == (2, 2)
    assert said.count("the fork server of this node was killed. So worker") == 2


def test_agent_that_is_asked_to_end_leaves_no_worker(job: Job):
    with job:
        agent = job.agent("1")
        workers = job.round(2)
        agent.terminate()
        left = [*parents(workers), *(worker.pid for worker in workers)]
        until(lambda: not any(psutil.pid_exists(pid) for pid in left))


def test_spare_has_imported_before_its_turn(job: Job):
    """A node stands by, and takes over from one that has been lost."""
    with job:
        lost = job.agent("1", node="a")
        first = job.round(2)
        spare = job.agent("1", node="b")
        server = until_child(spare.process.pid)
        until(lambda: "muster-python: preloaded" in spare.said())
        lost.kill()
        second = job.round(2, after=first[0].round)
        assert parents(second) == {server}
        job.finish()
        assert spare.wait() == 0, job.said()


def until_child(agent: int) -> int:
    """Return the fork server of an agent, once it runs."""
    found: list[int] = []

    def look() -> bool:
        found[:] = [
            one.pid for one in psutil.Process(agent).children() if "--listener" in " ".join(one.cmdline())
        ]
        return bool(found)

    until(look)
    return found[0]
