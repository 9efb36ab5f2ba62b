"""Real torchrun agents, on the coordinator alone: no node hosts what the others die with."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.patience import until
from lab.processes.agents import Job
from lab.processes.coordinator import Coordinator
from muster.worker.store import CoordinatorStore

pytestmark = pytest.mark.also_through_relay


@pytest.fixture
def job(coordinator: Coordinator, tmp_path: Path) -> Iterator[Job]:
    folder = tmp_path / "job"
    folder.mkdir()
    with Job(folder, coordinator.endpoint) as job:
        yield job


def departed(coordinator: Coordinator) -> list[str]:
    return [line["reason"] for line in coordinator.log("node.gone")]


def test_a_killed_worker_is_restarted_in_a_new_round_of_the_same_agents(coordinator: Coordinator, job: Job):
    agents = [job.agent("2") for _ in range(2)]
    first = job.round(2)
    assert {worker.agent for worker in first} == {agent.process.pid for agent in agents}
    os.kill(first[1].pid, signal.SIGKILL)
    second = job.round(2, after=first[0].round)
    keys = CoordinatorStore(coordinator.endpoint, "job").list_keys()
    assert {key.split("/")[0] for key in keys} == {f"torch.rendezvous.job.{second[0].round}"}
    # Who stays keeps its rank.
    assert [worker.agent for worker in second] == [worker.agent for worker in first]
    job.finish()
    assert [agent.wait() for agent in agents] == [0, 0], job.said()
    assert coordinator.logged("barrier.decided")[-1]["outcome"] == "RELEASED"
    assert coordinator.logged("run.closed")


def test_the_others_form_a_round_without_a_killed_agent(coordinator: Coordinator, job: Job):
    agents = [job.agent("1:2", last_call_timeout=3) for _ in range(2)]
    first = job.round(2)
    agents[0].kill()
    second = job.round(1, after=first[0].round)
    assert second[0].agent == agents[1].process.pid
    job.finish()
    assert agents[1].wait() == 0, job.said()
    until(
        lambda: any(
            f"(pid {agents[0].process.pid})" in line and "connection lost" in line
            for line in departed(coordinator)
        )
    )


def test_error_names_present_and_departed_nodes_when_there_are_too_few(coordinator: Coordinator, job: Job):
    agents = [job.agent("2", join_timeout=20) for _ in range(2)]
    job.round(2)
    agents[0].kill()
    assert agents[1].wait() != 0
    said = agents[1].said()
    assert "RendezvousTimeoutError" in said
    assert f"1 of 2 nodes had joined: 127.0.0.1 (pid {agents[1].process.pid})" in said
    assert f"gone: 127.0.0.1 (pid {agents[0].process.pid}) of round 0, connection lost" in said


def test_later_node_is_admitted_and_a_leaving_node_noticed_at_once(coordinator: Coordinator, job: Job):
    first_agent = job.agent("1:2")
    alone = job.round(1)
    second_agent = job.agent("1:2")
    both = job.round(2, after=alone[0].round)
    assert [worker.agent for worker in both] == [first_agent.process.pid, second_agent.process.pid]
    # SIGTERM is how a node is taken away: it says so, and nobody waits for its keep-alive.
    second_agent.terminate()
    again = job.round(1, after=both[0].round)
    assert again[0].agent == first_agent.process.pid
    until(lambda: any("left (the agent ended)" in line for line in departed(coordinator)))
    job.finish()
    assert first_agent.wait() == 0, job.said()


STUCK = '''
"""Wait as for a collective that never ends, until a file tells to finish."""

import os
import sys
import time
from pathlib import Path

folder = Path(sys.argv[1])
said = " ".join((os.environ["MUSTER_ROUND"], os.environ["RANK"], os.environ["WORLD_SIZE"], str(os.getppid())))
born = folder / f"born-{os.getpid()}"
born.write_text(said)
born.rename(folder / f"worker-{os.getpid()}")
while not (folder / "finish").exists():
    time.sleep(0.02)
'''


def test_workers_do_not_wait_for_those_of_an_agent_that_was_terminated(
    coordinator: Coordinator, tmp_path: Path
):
    with Job(tmp_path, coordinator.endpoint, program=STUCK, restarts=0) as job:
        agents = [job.agent("1:2") for _ in range(2)]
        both = job.round(2)
        agents[0].terminate()
        alone = job.round(1, after=both[0].round)
        assert alone[0].agent == agents[1].process.pid
        job.finish()
        assert agents[1].wait() == 0, job.said()


def test_the_job_outlives_its_coordinator(coordinator: Coordinator, job: Job):
    agents = [job.agent("2", keep_alive_max_attempt=60) for _ in range(2)]
    first = job.round(2)
    coordinator.kill()
    os.kill(first[0].pid, signal.SIGKILL)
    coordinator.start()
    second = job.round(2, after=first[0].round)
    assert second[0].round == first[0].round + 1
    assert [worker.agent for worker in second] == [worker.agent for worker in first]
    job.finish()
    assert [agent.wait() for agent in agents] == [0, 0], job.said()


def test_the_node_with_rank_0_leaves_first_and_the_rest_finds_the_new_one(coordinator: Coordinator, job: Job):
    agents = [job.agent("1:3", last_call_timeout=3) for _ in range(3)]
    first = job.round(3)
    by_pid = {agent.process.pid: agent for agent in agents}
    by_pid[first[0].agent].terminate()
    second = job.round(2, after=first[0].round)
    # Rank 0 moved, and the workers found each other at the new address.
    assert {worker.agent for worker in second} == {first[1].agent, first[2].agent}
    job.finish()
    assert [by_pid[worker.agent].wait() for worker in second] == [0, 0], job.said()
