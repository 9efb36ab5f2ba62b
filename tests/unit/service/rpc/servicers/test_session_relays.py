"""Sessions of relays, which speak for several processes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from muster.service.core.vocabulary.refusal import Reason
from muster.service.rpc import codec
from muster.service.rpc.servicers.session import SessionServicer
from muster.v1 import common_pb2, session_pb2
from tests.support.world.driver_world import virtual_driver
from tests.support.world.session_world import (
    Ended,
    FakeContext,
    assert_refused,
)
from tests.support.world.virtual_time import in_virtual_time


class Coordinator:
    """A whole one but for the network."""

    def __init__(self) -> None:
        self.driver = virtual_driver()
        self.servicer = SessionServicer(self.driver)
        self.peers: list[Peer] = []

    async def peer(self, **hello: Any) -> "Peer":
        """A stream that has said hello and was welcomed."""
        peer = Peer(self.servicer)
        self.peers.append(peer)
        peer.says(hello=session_pb2.Hello(run_id="job", protocol_version=1, **hello))
        assert (await peer.hears()).HasField("welcome")
        return peer


class Peer:
    """One stream to it."""

    def __init__(self, servicer: SessionServicer) -> None:
        self.context = FakeContext()
        self.serving = asyncio.create_task(servicer.connect(None, self.context))

    def says(self, **message: Any) -> None:
        self.context.says(session_pb2.ConnectRequest(**message))

    async def hears(self) -> session_pb2.ConnectResponse:
        return session_pb2.ConnectResponse.FromString(await self.context.heard.get())

    async def enters(self, *ranks: int) -> list[session_pb2.Entry]:
        self.says(add_processes=session_pb2.AddProcesses(processes=[a_process(rank) for rank in ranks]))
        return list((await self.hears()).processes_added.entries)

    async def is_refused(self, **message: Any) -> session_pb2.Refusal:
        self.says(**message)
        heard = await self.hears()
        assert heard.HasField("refusal")
        return heard.refusal

    def arrives(self, *ranks: int) -> None:
        arrivals = [session_pb2.Arrival(rank=rank) for rank in ranks]
        self.says(arrive=session_pb2.Arrive(prefix="ckpt", timeout_ms=60_000, arrivals=arrivals))


def a_process(rank: int) -> session_pb2.Process:
    return session_pb2.Process(rank=rank, incarnation=f"life-{rank}", host="node", pid=1)


@asynccontextmanager
async def a_coordinator() -> AsyncIterator[Coordinator]:
    coordinator = Coordinator()
    yield coordinator
    for peer in coordinator.peers:
        peer.serving.cancel()
        await asyncio.wait({peer.serving})
    await coordinator.driver.close()


@in_virtual_time
async def test_relay_gets_ranks_with_a_message_and_other_peers_do_not():
    async with a_coordinator() as coordinator:
        relay, own = await coordinator.peer(relay="node"), await coordinator.peer(processes=[a_process(2)])
        assert [entry.ordinal > 0 for entry in await relay.enters(0, 1, 3)] == [True] * 3
        for peer, ranks in ((relay, [0, 1, 3]), (own, [])):
            participants = [0, 1, 2]
            group = session_pb2.JoinGroup(prefix="ckpt", world_size=4, ranks=ranks, participants=participants)
            peer.says(join_group=group)
        refusal, joined = (await relay.hears()).refusal, (await relay.hears()).group_joined
        assert (refusal.prefix, refusal.rank, [one.rank for one in joined.positions]) == ("ckpt", 3, [0, 1])
        assert (await own.hears()).HasField("group_joined")
        relay.arrives(1, 0)
        own.arrives(2)
        shared = await own.context.heard.get()
        appended = await relay.context.heard.get()
        assert appended == shared + codec.encode_ranks([0, 1])
        message = session_pb2.ConnectResponse.FromString(appended)
        assert (message.decision.outcome, list(message.ranks)) == (common_pb2.OUTCOME_RELEASED, [0, 1])
        assert not session_pb2.ConnectResponse.FromString(shared).ranks


@in_virtual_time
async def test_parting_processes_are_answered_after_the_commit():
    async with a_coordinator() as coordinator:
        relay = await coordinator.peer(relay="node")
        await relay.enters(0, 1)
        relay.says(
            remove_processes=session_pb2.RemoveProcesses(
                ranks=[1, 9], goodbye=session_pb2.Goodbye(reason="done")
            )
        )
        relay.says(remove_processes=session_pb2.RemoveProcesses(ranks=[0]))
        assert [list((await relay.hears()).processes_removed.ranks) for _ in range(2)] == [[1, 9], [0]]
        relay.says(goodbye=session_pb2.Goodbye())
        await relay.serving


@in_virtual_time
async def test_relay_message_on_another_stream_is_refused():
    async with a_coordinator() as coordinator:
        own = await coordinator.peer(processes=[a_process(2)])
        for message in (
            {"add_processes": session_pb2.AddProcesses()},
            {"remove_processes": session_pb2.RemoveProcesses(ranks=[2])},
        ):
            refusal = await own.is_refused(**message)
            assert (refusal.code, refusal.HasField("rank")) == (3, False)
        group = session_pb2.JoinGroup(prefix="ckpt", world_size=4)
        own.says(join_group=group)
        assert (await own.hears()).HasField("group_joined")


@in_virtual_time
async def test_enter_before_the_hello_is_refused():
    async with a_coordinator() as coordinator:
        peer = Peer(coordinator.servicer)
        coordinator.peers.append(peer)
        refusal = await peer.is_refused(add_processes=session_pb2.AddProcesses(processes=[a_process(0)]))
        assert "the first message of a session must be a Hello" in refusal.message
        assert coordinator.driver.coordinator.runs == {}


@in_virtual_time
async def test_relay_gets_a_refusal_for_each_invalid_rank():
    async with a_coordinator() as coordinator:
        relay = await coordinator.peer(relay="node")
        entries = await relay.enters(0, 0, -5, 70_000, 1)
        assert [entry.refusal.code for entry in entries] == [0, 3, 3, 3, 0]
        assert await relay.enters() == []


@in_virtual_time
async def test_processes_may_return_after_their_relay_sent_garbage():
    async with a_coordinator() as coordinator:
        relay = await coordinator.peer(relay="node")
        await relay.enters(0, 1)
        relay.context.says(b"\xff\xfe")
        with pytest.raises(Ended):
            await relay.serving
        assert_refused(relay.context.status, Reason.INVALID_ARGUMENT)
        again = await coordinator.peer(relay="node")
        assert [entry.refusal.code for entry in await again.enters(0, 1)] == [0, 0]


@in_virtual_time
async def test_relay_may_get_an_answer_for_each_rank_at_once():
    """Where another peer would be taken for one that does not read."""
    ranks = range(2_000)
    async with a_coordinator() as coordinator:
        relay = await coordinator.peer(relay="node")
        await relay.enters(*ranks)
        relay.arrives(*ranks)
        refused = [(await relay.hears()).refusal for _ in ranks]
        assert [one.rank for one in refused] == list(ranks)
        assert {one.prefix for one in refused} == {"ckpt"}
        assert await relay.enters() == []
