"""A relay's stream to a real coordinator: the end of one rank does not affect the others."""

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from lab.patience import PATIENCE
from lab.processes import command
from lab.processes.coordinator import Coordinator
from muster.v1 import common_pb2, run_pb2, run_pb2_grpc, session_pb2, session_pb2_grpc

RELAY = "node-0 (pid 70)"


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    with Coordinator(tmp_path, session_ttl=3.0) as running:
        yield running


class RelayStream:
    """A relay's stream for ranks 0 to 3 of one run."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._channel = grpc.insecure_channel(
            coordinator.endpoint, options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._said: queue.SimpleQueue[session_pb2.ConnectRequest | None] = queue.SimpleQueue()
        stub = session_pb2_grpc.SessionServiceStub(self._channel)
        self._heard = stub.Connect(iter(self._said.get, None), timeout=PATIENCE)
        self.say(hello=session_pb2.Hello(run_id="job1", relay=RELAY, protocol_version=1))
        assert list(self.hear().welcome.ordinals) == []

    def say(self, **message: Any) -> None:
        self._said.put(session_pb2.ConnectRequest(**message))

    def hear(self) -> session_pb2.ConnectResponse:
        return next(self._heard)

    def add_processes(
        self, *ranks: int, name: str = "a", ordinals: dict[int, int] | None = None
    ) -> dict[int, int]:
        """Add processes of these ranks. Returns their ordinals."""
        known = ordinals or {}
        processes = [
            session_pb2.Process(
                rank=rank, incarnation=f"{name}-{rank}", host="node-0", pid=1, ordinal=known.get(rank, 0)
            )
            for rank in ranks
        ]
        self.say(add_processes=session_pb2.AddProcesses(processes=processes))
        entries = self.hear().processes_added.entries
        assert not any(entry.HasField("refusal") for entry in entries)
        self.say(join_group=session_pb2.JoinGroup(prefix="checkpoint", world_size=4, ranks=ranks))
        assert [one.rank for one in self.hear().group_joined.positions] == list(ranks)
        return {rank: entry.ordinal for rank, entry in zip(ranks, entries, strict=True)}

    def arrive(self, *ranks: int, sequence: int = 0) -> None:
        arrivals = [session_pb2.Arrival(rank=rank) for rank in ranks]
        self.say(
            arrive=session_pb2.Arrive(
                prefix="checkpoint", sequence=sequence, timeout_ms=60_000, arrivals=arrivals
            )
        )

    def decision(self) -> tuple[common_pb2.Outcome.ValueType, list[int]]:
        """Return the next message, and the ranks that it is for."""
        heard = self.hear()
        assert heard.HasField("decision")
        return heard.decision.outcome, list(heard.ranks)

    def close(self) -> None:
        self._heard.cancel()
        self._channel.close()


def muster(coordinator: Coordinator, *arguments: str) -> str:
    done = command.muster(coordinator.endpoint, *arguments)
    done.check_returncode()
    return done.stdout


def test_new_process_of_an_evicted_rank_is_added(coordinator: Coordinator):
    stream = RelayStream(coordinator)
    stream.add_processes(0, 1, 2, 3)
    shown = muster(coordinator, "get", "members", "job1", "-o", "wide")
    assert shown.count(RELAY) == 4
    assert f"Relay:        {RELAY}" in muster(coordinator, "describe", "member", "job1", "2")
    muster(coordinator, "evict", "job1", "2", "--reason", "a broken GPU")
    refusal, info = stream.hear().refusal, ErrorInfo()
    assert refusal.error_info.Unpack(info)
    assert (info.reason, refusal.prefix, refusal.rank) == ("EVICTED", "", 2)
    stream.add_processes(2, name="b")
    stream.arrive(0, 1, 2, 3)
    assert stream.decision() == (common_pb2.OUTCOME_RELEASED, [0, 1, 2, 3])
    stream.close()


def test_returning_relay_stream_gets_the_same_answers_after_a_kill(coordinator: Coordinator):
    stream = RelayStream(coordinator)
    ordinals = stream.add_processes(0, 1, 2, 3)
    stream.arrive(0, 1, 2, 3)
    assert stream.decision() == (common_pb2.OUTCOME_RELEASED, [0, 1, 2, 3])
    stream.arrive(0, 1, sequence=1)
    coordinator.kill()
    with pytest.raises(grpc.RpcError):
        stream.hear()
    stream.close()
    coordinator.start()
    again = RelayStream(coordinator)
    assert again.add_processes(0, 1, 2, ordinals=ordinals) == {rank: ordinals[rank] for rank in range(3)}
    again.arrive(0, 2)
    assert again.decision() == (common_pb2.OUTCOME_RELEASED, [0, 2])
    again.arrive(0, 1, 2, sequence=1)
    assert again.decision() == (common_pb2.OUTCOME_MEMBER_LOST, [0, 1, 2])
    again.close()


def test_ranks_of_a_broken_relay_stream_are_lost_unless_they_return(coordinator: Coordinator):
    first, second = RelayStream(coordinator), RelayStream(coordinator)
    ordinals = first.add_processes(0, 1)
    second.add_processes(2, 3)
    first.close()
    second.add_processes(0, ordinals=ordinals)
    second.arrive(2, 3)
    assert second.decision() == (common_pb2.OUTCOME_MEMBER_LOST, [2, 3])
    with grpc.insecure_channel(coordinator.endpoint) as channel:
        members = run_pb2_grpc.RunServiceStub(channel).Members(run_pb2.MembersRequest(run_id="job1")).members
    assert [one.state == common_pb2.MEMBER_STATE_CONNECTED for one in members] == [True, False, True, True]
    second.close()
