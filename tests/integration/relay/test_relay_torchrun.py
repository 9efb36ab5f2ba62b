"""torchrun's agents with and without their relays: the same rounds and barriers, and nothing is left."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.patience import PATIENCE, until
from lab.processes.agents import Job, Worker
from lab.processes.coordinator import Coordinator
from tests.support.chaos.save_chaos import SaveChaos
from tests.support.members import members


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the agents' relays have their sockets; a socket's path must be short."""
    with tempfile.TemporaryDirectory(prefix="m-") as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def sockets(folder: Path) -> list[Path]:
    return sorted(folder.glob("muster-*/relay.sock"))


def connections(coordinator: Coordinator) -> int:
    """Count the connections to the coordinator, of all processes on this machine."""
    remote, established = f":{coordinator.port:04X}", "01"
    # gRPC opens sockets of both families.
    texts = [Path(f"/proc/net/{table}").read_text() for table in ("tcp", "tcp6")]
    rows = [line.split()[2:4] for text in texts for line in text.splitlines()]
    return sum(address.endswith(remote) and state == established for address, state in rows)


def relays_of(coordinator: Coordinator, workers: list[Worker]) -> list[set[str]]:
    """Through which relays the workers of each agent speak."""
    shown = {one.pid: one.relay for one in members(coordinator.endpoint)}
    agents = sorted({worker.agent for worker in workers})
    return [{shown[worker.pid] for worker in workers if worker.agent == agent} for agent in agents]


def recover(folder: Path, place: Path, agents: int, ranks: int, relay: int) -> None:
    """A job loses a worker, and then a machine."""
    place.mkdir()
    with (
        Coordinator(place, session_ttl=3.0) as coordinator,
        Job(place, coordinator.endpoint, ranks=ranks) as job,
    ):
        for _ in range(agents):
            job.agent(f"1:{agents}", last_call_timeout=3, relay=relay)
        first = job.round(agents * ranks)
        os.kill(first[-1].pid, signal.SIGKILL)
        second = job.round(agents * ranks, after=first[0].round)
        until(lambda: {w.pid for w in second} == {one.pid for one in members(coordinator.endpoint)}, job.said)
        seen = relays_of(coordinator, second)
        if relay:
            assert all(len(one) == 1 and "" not in one for one in seen), seen
            assert len(set.union(*seen)) == agents == len(sockets(folder))
            # Those of the agents' rounds and stores as well.
            until(
                lambda: connections(coordinator) == agents, lambda: f"{connections(coordinator)} of {agents}"
            )
        else:
            assert seen == [{""}] * agents
            assert sockets(folder) == []
        # A machine that dies takes its relay along.
        gone = next(agent for agent in job.agents if agent.process.pid == second[-1].agent)
        gone.kill()
        third = job.round((agents - 1) * ranks, after=second[0].round)
        assert gone.process.pid not in {worker.agent for worker in third}
        job.finish()
        others = [agent for agent in job.agents if agent is not gone]
        assert [agent.wait() for agent in others] == [0] * (agents - 1), job.said()
        assert coordinator.logged("barrier.decided")[-1]["outcome"] == "RELEASED"
    # What SIGKILL leaves is the dead agent's.
    left = list(folder.glob("muster-*"))
    assert len(left) == relay
    for one in left:
        shutil.rmtree(one)


def test_a_job_recovers_from_a_killed_worker_and_a_killed_agent(tmp_path: Path, folder: Path, thorough: bool):
    agents, ranks = (4, 4) if thorough else (2, 2)
    for relay in (1, 0) if thorough else (1,):
        recover(folder, tmp_path / str(relay), agents, ranks, relay)


def test_an_agent_begins_no_relay_where_it_is_told_so(tmp_path: Path, folder: Path):
    (tmp_path / "job").mkdir()
    with Coordinator(tmp_path) as coordinator, Job(tmp_path / "job", coordinator.endpoint, ranks=2) as job:
        agent = job.agent("1", relay=0)
        workers = job.round(2)
        until(lambda: len(members(coordinator.endpoint)) == 2, job.said)
        assert relays_of(coordinator, workers) == [{""}]
        assert sockets(folder) == []
        job.finish()
        assert agent.wait() == 0, job.said()


def test_workers_go_on_when_their_agent_dies_alone_and_its_relay_with_it(tmp_path: Path, folder: Path):
    (tmp_path / "job").mkdir()
    with (
        Coordinator(tmp_path, session_ttl=PATIENCE) as coordinator,
        Job(tmp_path / "job", coordinator.endpoint, ranks=2) as job,
    ):
        agent = job.agent("1")
        workers = job.round(2)
        until(lambda: len(members(coordinator.endpoint)) == 2, job.said)
        assert "" not in {one.relay for one in members(coordinator.endpoint)}
        agent.process.kill()
        agent.process.wait()
        until(lambda: {one.relay for one in members(coordinator.endpoint)} == {""}, job.said)
        job.finish()
        assert coordinator.logged("barrier.decided")[-1]["outcome"] == "RELEASED"
        assert {worker.pid for worker in workers} == {one.pid for one in members(coordinator.endpoint)}


def test_saves_are_whole_with_relays_and_without(tmp_path: Path, folder: Path, thorough: bool):
    """test_saves_torchrun.py has the longer history, with relays."""
    saves, size = (60, 4) if thorough else (14, 2)
    for relays in (True, False) if thorough else (True,):
        (tmp_path / str(relays)).mkdir()
        every = (saves // 2, saves // 2)
        chaos = SaveChaos(seed=8, saves=saves, agents=size, ranks=size, relays=relays, rank_every=every)
        chaos.run(tmp_path / str(relays))
        print(chaos.account())
        assert chaos.wrong == []
        assert chaos.injected["rank killed"] >= 1
        assert len(chaos.committed) >= saves / 3
        # Its agents have ended by themselves.
        assert list(folder.glob("muster-*")) == []
