"""``muster replace`` with real torchrun: the node with rank 0 goes, and training goes on at the next step."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.processes.agents import Job
from lab.processes.command import muster
from lab.processes.coordinator import Coordinator
from lab.replacing import EVICTED, ReplaceableJob, Replacing, judge

NODES = 2


@pytest.fixture
def job(coordinator: Coordinator, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ReplaceableJob]:
    folder = tmp_path / "job"
    folder.mkdir()
    with ReplaceableJob(folder, coordinator.endpoint, NODES, getattr(request, "param", 1000)) as job:
        yield job


@pytest.mark.parametrize("job", [0], indirect=True, ids=["no restart after a failure"])
def test_node_with_rank_0_is_replaced_and_no_step_is_trained_again(
    coordinator: Coordinator, job: ReplaceableJob
):
    for _ in range(NODES):
        job.start()
    number, (first, other) = job.in_round()
    refused = muster(coordinator.endpoint, "replace", "job", first.node, "--wait=0")
    assert (refused.returncode, "0 of 1 nodes stand by" in refused.stderr) == (4, True), refused.stderr
    spare = job.start()
    job.trains(number, steps=10)
    replaced = muster(coordinator.endpoint, "replace", "job", first.node, "--wait=100", "--reason=bad disk")
    assert replaced.returncode == 0, replaced.stderr + job.said()
    assert f"node {first.node} was replaced; round {number + 1} is complete with 2 nodes" in replaced.stdout
    assert first.wait() == EVICTED, first.said()
    later, agents = job.in_round(after=number)
    assert agents == [spare, other]
    job.trains(later, steps=10)
    repeated = muster(coordinator.endpoint, "replace", "job", first.address)
    assert repeated.returncode == 0, repeated.stderr
    assert f"node {first.address} is not in the round" in repeated.stdout
    job.finish()
    assert [agent.wait() for agent in agents] == [0, 0], job.said()
    verdict = judge(job.folder)
    assert verdict.wrong == []
    assert verdict.again == {number: 0, later: 0}
    assert not coordinator.log("run.stopped")
    assert coordinator.logged("run.closed")


def test_workers_without_a_save_point_are_replaced_and_no_agent_counts_a_failure(
    coordinator: Coordinator, tmp_path: Path
):
    with Job(tmp_path, coordinator.endpoint, restarts=0) as job:
        agents = [job.agent("2", address=f"127.0.0.{number}", node=f"node-{number}") for number in (2, 3, 4)]
        first = job.round(2)
        by_pid = {agent.process.pid: agent for agent in agents}
        evicted = by_pid[first[0].agent]
        replaced = muster(coordinator.endpoint, "replace", "job", evicted.address, "--no-save")
        assert replaced.returncode == 0, replaced.stderr + job.said()
        assert evicted.wait() == EVICTED, evicted.said()
        job.round(2, after=first[0].round)
        job.finish()
        assert sorted(agent.wait() for agent in agents) == [0, 0, EVICTED], job.said()


@pytest.mark.thorough_only
def test_job_outlives_random_kills_and_replacements_of_its_nodes(
    coordinator: Coordinator, job: ReplaceableJob
):
    replacing = Replacing(job, seed=32)
    replacing.events(50)
    job.finish()
    verdict = judge(job.folder)
    print(replacing.account, verdict.steps, "steps; trained again:", verdict.again)
    assert verdict.wrong == []
