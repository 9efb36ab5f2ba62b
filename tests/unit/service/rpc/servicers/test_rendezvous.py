"""RendezvousService over a driver in virtual time, without a socket."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import Any

import pytest

from muster.client.protocol import AGENT_RELAY_HEADER, PROTOCOL_VERSION, RELAY_HEADER
from muster.service.core.vocabulary.effects import NO_RANKS, Message, NodesWaiting, Refused, RoundComplete
from muster.service.core.vocabulary.events import Arrival, Arrive, Hello, JoinGroup, ProcessInfo
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.driver import Driver, Outgoing
from muster.service.rpc.push_stream import PushStream
from muster.service.rpc.servicers.rendezvous import RendezvousServicer
from muster.service.rpc.servicers.run import RunServicer
from muster.service.snapshots import Snapshots
from muster.v1 import common_pb2, rendezvous_pb2, run_pb2
from tests.support.world.driver_world import virtual_driver
from tests.support.world.virtual_time import in_virtual_time

KEEP_ALIVE = 15.0
RESET_GRACE = 3.0
LAST_CALL = 30.0


class Service:
    """The servicers, called as gRPC calls them."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.rendezvous = RendezvousServicer(driver)
        self.runs = RunServicer(driver, Snapshots())

    async def get(self, run_id: str = "job1") -> rendezvous_pb2.Rendezvous:
        request = rendezvous_pb2.RendezvousServiceGetRequest(run_id=run_id)
        return (await self.rendezvous.Get(request, None)).rendezvous

    async def close(self, *, dry_run: bool = False, abort_barriers: bool = False, by: str = "me") -> Any:
        request = rendezvous_pb2.CloseRequest(
            run_id="job1", by=by, reason="done", dry_run=dry_run, abort_barriers=abort_barriers
        )
        return await self.rendezvous.Close(request, None)


class Context:
    """The call of an agent."""

    def __init__(self, headers: Iterable[str]) -> None:
        self._headers = headers

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return [(name, "x") for name in self._headers]


class Node:
    """One agent, and its open stream."""

    def __init__(
        self, service: Service, name: str, fewest: int = 2, most: int = 2, headers: Iterable[str] = ()
    ) -> None:
        self.service = service
        self.context = Context(headers)
        self.name = name
        self.request = rendezvous_pb2.JoinRequest(
            run_id="job1",
            node=rendezvous_pb2.Node(incarnation=f"{name}-life", address=name, pid=1),
            attempt=1,
            min_nodes=fewest,
            max_nodes=most,
            join_timeout_ms=600_000,
            last_call_timeout_ms=int(LAST_CALL * 1000),
            keep_alive_timeout_ms=int(KEEP_ALIVE * 1000),
            protocol_version=PROTOCOL_VERSION,
        )
        self.messages: list[rendezvous_pb2.JoinResponse] = []
        self.stream: asyncio.Task[None] | None = None

    def join(self) -> "Node":
        self.stream = asyncio.create_task(self._read())
        return self

    async def _read(self) -> None:
        async for response in self.service.rendezvous.Join(self.request, self.context):
            self.messages.append(response)

    @property
    def kinds(self) -> list[str]:
        return [str(response.WhichOneof("message")) for response in self.messages]

    async def ends(self) -> Refusal:
        assert self.stream is not None
        with pytest.raises(Refusal) as caught:
            await self.stream
        return caught.value

    async def breaks(self) -> None:
        """The stream is cancelled, as when the connection is lost."""
        assert self.stream is not None
        self.stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.stream


@asynccontextmanager
async def serving() -> AsyncIterator[Service]:
    driver = virtual_driver()
    try:
        yield Service(driver)
    finally:
        await driver.close()


async def soon() -> None:
    await asyncio.sleep(0.001)


@in_virtual_time
async def test_node_hears_first_of_the_replicas_and_once():
    async with serving() as service:
        service.rendezvous = RendezvousServicer(
            service.driver, replicas=lambda: ["a:1", "b:1"], keepalive_ms=900
        )
        a, b = Node(service, "a").join(), Node(service, "b").join()
        await soon()
        for node in (a, b):
            assert node.kinds[0] == "replicas"
            assert node.kinds.count("replicas") == 1
            assert "round_complete" in node.kinds
        assert a.messages[0].replicas == rendezvous_pb2.Replicas(addresses=["a:1", "b:1"], keepalive_ms=900)
        for node in (a, b):
            await node.breaks()


async def refusal(call: Awaitable[Any]) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await call
    return caught.value


# ---------------------------------------------------------------------- joining


@in_virtual_time
async def test_nodes_get_their_round_on_their_streams():
    async with serving() as service:
        b = Node(service, "b").join()
        await soon()
        assert b.kinds == ["standing"]
        assert b.messages[0].standing.standing == rendezvous_pb2.NODE_STANDING_PARTICIPANT
        a = Node(service, "a").join()
        await soon()
        assert (a.kinds, b.kinds) == (["standing", "round_complete"],) * 2
        for rank, node in enumerate((a, b)):
            complete = rendezvous_pb2.RoundComplete(round=0, rank=rank, world_size=2)
            assert node.messages[-1].round_complete == complete
            await node.breaks()


@in_virtual_time
async def test_stream_that_breaks_is_a_node_that_is_away_and_then_gone():
    async with serving() as service:
        a, b = Node(service, "a").join(), Node(service, "b").join()
        await soon()
        await b.breaks()
        await soon()
        assert [node.connected for node in (await service.get()).nodes] == [True, False]
        await asyncio.sleep(KEEP_ALIVE)
        view = await service.get()
        assert [node.node.address for node in view.nodes] == ["a"]
        assert [(one.node.address, one.reason) for one in view.departed] == [("b", "connection lost")]
        b.request.round = 0
        assert (await b.join().ends()).reason is Reason.NODE_REMOVED
        await a.breaks()


@in_virtual_time
async def test_reset_grace_is_for_the_connection_of_the_agents_own_process():
    """A relay that is a process of its own may die and be started again, while the agent lives."""
    direct, own, other = (), (RELAY_HEADER, AGENT_RELAY_HEADER), (RELAY_HEADER,)
    async with serving() as service:
        nodes = [
            Node(service, str(n), 3, 3, headers).join() for n, headers in enumerate((direct, own, other))
        ]
        await soon()
        for node in nodes:
            await node.breaks()
        await asyncio.sleep(RESET_GRACE - 0.1)
        assert len((await service.get()).nodes) == 3
        await asyncio.sleep(0.2)
        assert [node.node.address for node in (await service.get()).nodes] == ["2"]
        await asyncio.sleep(KEEP_ALIVE)
        assert not (await service.get()).nodes


@in_virtual_time
async def test_stream_that_is_opened_again_resumes():
    async with serving() as service:
        a, b = Node(service, "a").join(), Node(service, "b").join()
        await soon()
        await b.breaks()
        b.request.round = 0
        b.messages.clear()
        b.join()
        await soon()
        assert b.kinds == ["round_complete", "nodes_waiting"]
        await a.breaks()
        await b.breaks()


@in_virtual_time
async def test_refusal_ends_the_stream():
    async with serving() as service:
        a, odd = Node(service, "a").join(), Node(service, "odd", 3, 4).join()
        assert (await odd.ends()).reason is Reason.SETTINGS_DIFFER
        assert odd.messages == []
        assert (await a.ends()).reason is Reason.RENDEZVOUS_TIMED_OUT
        assert a.kinds == ["standing"]
        assert service.driver.coordinator.node_streams == {}


@in_virtual_time
async def test_node_of_another_protocol_gets_no_place():
    async with serving() as service:
        a = Node(service, "a")
        a.request.protocol_version = 99
        assert (await a.join().ends()).reason is Reason.PROTOCOL_VERSION
        assert (await refusal(service.get())).reason is Reason.RUN_NOT_FOUND


@in_virtual_time
async def test_draining_coordinator_ends_the_streams_and_takes_no_more():
    async with serving() as service:
        a = Node(service, "a").join()
        await soon()
        service.driver.retire()
        service.rendezvous.drain()
        assert (await a.ends()).reason is Reason.COORDINATOR_DRAINING
        assert (await Node(service, "b").join().ends()).reason is Reason.COORDINATOR_DRAINING


# ---------------------------------------------------------------------- the outbox


@in_virtual_time
async def test_messages_before_the_end_are_still_read():
    async with serving() as service:
        membership = PushStream(service.driver)
        no = Refusal(Reason.RUN_CLOSED, "closed.")
        say(membership, NodesWaiting(1))
        say(membership, Refused(no))
        membership.end(Refusal(Reason.COORDINATOR_DRAINING, "too late to matter."))
        heard: list[Message] = []
        with pytest.raises(Refusal) as caught:
            async for message in membership:
                heard.append(message)
        assert heard == [NodesWaiting(1)]
        assert caught.value is no


@in_virtual_time
async def test_node_that_does_not_read_hears_the_newest_message_of_each_type_in_order():
    async with serving() as service:
        membership = PushStream(service.driver)
        complete = RoundComplete(1, 0, 2)
        for notice in (NodesWaiting(1), complete, NodesWaiting(2), NodesWaiting(3)):
            say(membership, notice)
        membership.end(Refusal(Reason.COORDINATOR_DRAINING, "enough."))
        heard: list[Message] = []
        with pytest.raises(Refusal):
            async for message in membership:
                heard.append(message)
        assert heard == [complete, NodesWaiting(3)]


def say(membership: PushStream, message: Message) -> None:
    membership.deliver(Outgoing(message, lambda _: b""))


# ---------------------------------------------------------------------- leaving and closing


@in_virtual_time
async def test_leaving_says_whether_there_was_a_place():
    async with serving() as service:
        a = Node(service, "a").join()
        await soon()
        request = rendezvous_pb2.LeaveRequest(run_id="job1", incarnation="a-life", reason="bye")
        assert (await service.rendezvous.Leave(request, None)).had_place
        assert (await a.ends()).reason is Reason.NODE_REMOVED
        assert not (await service.rendezvous.Leave(request, None)).had_place
        assert [one.reason for one in (await service.get()).departed] == ["left (bye)"]


def a_rank_waits(service: Service, rank: int = 0) -> None:
    """A process of the run opens a barrier of two ranks."""

    class Nobody:
        def deliver(self, outgoing: Outgoing, ranks: AbstractSet[int] = NO_RANKS) -> None:
            pass

    session = service.driver.connect(Nobody())
    service.driver.submit(Hello(session, "job1", 0, (ProcessInfo(rank, f"p{rank}", "node", 1),)))
    service.driver.submit(JoinGroup(session, "checkpoint", 2))
    service.driver.submit(Arrive(session, "checkpoint", 0, 300.0, (Arrival(rank),)))


@in_virtual_time
async def test_dry_run_of_closing_shows_affected_nodes_and_changes_nothing():
    async with serving() as service:
        a = Node(service, "a").join()
        a_rank_waits(service)
        await soon()
        shown = await service.close(dry_run=True)
        assert shown == rendezvous_pb2.CloseResponse(
            waiting_nodes=[a.request.node],
            connected_processes=1,
            open_barriers=[common_pb2.BarrierName(prefix="checkpoint", sequence=0)],
        )
        assert not (await service.get()).HasField("closed")
        await a.breaks()


@in_virtual_time
async def test_closing_shows_affected_nodes_and_is_pushed_to_them():
    async with serving() as service:
        a, b = Node(service, "a", 1, 2).join(), Node(service, "b", 1, 2).join()
        stands_by = Node(service, "c", 1, 2).join()
        await soon()
        shown = await service.close()
        assert (shown.was_closed, shown.closed.by, shown.closed.reason) == (False, "me", "done")
        assert (shown.nodes_in_round, list(shown.waiting_nodes)) == (2, [stands_by.request.node])
        await soon()
        assert a.messages[-1].closed == b.messages[-1].closed == shown.closed
        assert (await stands_by.ends()).reason is Reason.NODE_NOT_NEEDED
        again = await service.close(by="other")
        assert (again.was_closed, again.closed) == (True, shown.closed)
        assert (await service.close(by="other", dry_run=True)).closed == shown.closed
        assert (await service.get()).closed == shown.closed
        for node in (a, b):
            await node.breaks()


@in_virtual_time
async def test_closing_may_end_the_barriers():
    async with serving() as service:
        a_rank_waits(service)
        await service.close(abort_barriers=True)
        assert (await service.close(dry_run=True)).open_barriers == []


@in_virtual_time
async def test_unknown_run_cannot_be_closed_or_shown():
    async with serving() as service:
        for call in (service.close(), service.close(dry_run=True), service.get()):
            assert (await refusal(call)).reason is Reason.RUN_NOT_FOUND
        a_rank_waits(service)
        assert (await refusal(service.close(by=""))).reason is Reason.INVALID_ARGUMENT


@in_virtual_time
async def test_call_that_was_answered_leaves_nothing_behind():
    async with serving() as service:
        a_rank_waits(service)
        await soon()
        before = dict(service.driver._sinks)
        await service.rendezvous.Leave(rendezvous_pb2.LeaveRequest(run_id="job1", incarnation="x"), None)
        await refusal(service.close(by=""))
        await service.close(abort_barriers=True)
        await refusal(service.runs.Evict(run_pb2.EvictRequest(run_id="job1", rank=9), None))
        assert service.driver._sinks == before


# ---------------------------------------------------------------------- evicting


@in_virtual_time
async def test_evicting_shows_affected_members_and_a_dry_run_changes_nothing():
    async with serving() as service:
        a_rank_waits(service)
        a_rank_waits(service, rank=5)
        request = run_pb2.EvictRequest(run_id="job1", rank=5, reason="bad disk", dry_run=True)
        shown = await service.runs.Evict(request, None)
        assert [(one.rank, one.state) for one in shown.members] == [(5, common_pb2.MEMBER_STATE_CONNECTED)]
        request.dry_run = False
        assert [one.rank for one in (await service.runs.Evict(request, None)).members] == [5]
        members = await service.runs.Members(run_pb2.MembersRequest(run_id="job1"), None)
        assert [one.state for one in members.members] == [
            common_pb2.MEMBER_STATE_CONNECTED,
            common_pb2.MEMBER_STATE_EVICTED,
        ]
        assert (await refusal(service.runs.Evict(request, None))).reason is Reason.MEMBER_NOT_FOUND


@in_virtual_time
async def test_evicting_a_machine_shows_its_agents_and_a_dry_run_changes_nothing():
    async with serving() as service:
        a, b, c = (Node(service, name).join() for name in "abc")
        await soon()
        request = rendezvous_pb2.EvictNodeRequest(
            run_id="job1", node_name="a", by="", reason="bad disk", only_if_spare=True, dry_run=True
        )
        shown = await service.rendezvous.EvictNode(request, None)
        assert [(one.node.address, one.rank, one.connected) for one in shown.evicted] == [("a", 0, True)]
        assert shown.spares == 1
        assert len((await service.get()).nodes) == 3
        request.dry_run = False
        refused = await refusal(service.rendezvous.EvictNode(request, None))
        assert refused.reason is Reason.INVALID_ARGUMENT
        request.by = "ann"
        assert await service.rendezvous.EvictNode(request, None) == shown
        assert (await a.ends()).reason is Reason.NODE_EVICTED
        assert (b.kinds[-1], c.kinds[-1]) == ("nodes_waiting", "standing")
        for request.dry_run in (True, False):
            refused = await refusal(service.rendezvous.EvictNode(request, None))
            assert refused.reason is Reason.NODE_NOT_FOUND


# ---------------------------------------------------------------------- forgetting


@in_virtual_time
async def test_forgetting_is_refused_while_the_run_is_in_use():
    async with serving() as service:
        a_rank_waits(service)
        request = run_pb2.ForgetRequest(run_id="job1")
        for request.dry_run in (True, False):
            assert (await refusal(service.runs.Forget(request, None))).reason is Reason.RUN_IN_USE
        request.force = request.dry_run = True
        shown = await service.runs.Forget(request, None)
        assert (shown.processes, shown.nodes, shown.waiting_calls) == (1, 0, 0)
        assert [(one.prefix, one.sequence) for one in shown.open_barriers] == [("checkpoint", 0)]
        assert (await service.get()).run_id == "job1"
        request.dry_run = False
        assert await service.runs.Forget(request, None) == shown
        assert (await refusal(service.runs.Forget(request, None))).reason is Reason.RUN_NOT_FOUND
