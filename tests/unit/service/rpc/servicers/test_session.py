"""One session on a stream that the test holds both ends of."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from muster.service.core.vocabulary.effects import GroupJoined, Inspect, Refused, Welcome
from muster.service.core.vocabulary.events import Arrive, Disconnected, Event, Goodbye, Hello, JoinGroup
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.driver import Driver, Outgoing
from muster.service.rpc import codec, errors
from muster.service.rpc.interceptors.guard import ADMISSION, Admission
from muster.service.rpc.interceptors.unsent import log_slow_reader
from muster.service.rpc.join_turns import JoinTurns
from muster.service.rpc.servicers.session import Session, SessionServicer
from muster.service.security.grants import Grant, Role
from muster.service.storage.memory import MemoryEngine
from muster.service.telemetry.observers import Observers
from muster.serving.budget import SMALL
from muster.serving.queued import Queued
from muster.serving.writes import Writes
from muster.v1 import common_pb2, session_pb2
from muster.v1.insight_pb2 import Inspected
from tests.support.expect import some
from tests.support.world.virtual_time import START, LoopClock, in_virtual_time

HELLO = session_pb2.ConnectRequest(hello=session_pb2.Hello(run_id="job", protocol_version=1))
JOIN = session_pb2.ConnectRequest(join_group=session_pb2.JoinGroup(prefix="ckpt", world_size=2))
ARRIVE = session_pb2.ConnectRequest(arrive=session_pb2.Arrive(prefix="ckpt", timeout_ms=1_000))
GOODBYE = session_pb2.ConnectRequest(goodbye=session_pb2.Goodbye(reason="done"))
ID = 7


class FakeDriver:
    """Remembers what it was handed, in order."""

    def __init__(self) -> None:
        self.retired = False
        self.events: list[Event | str] = []
        self._changed = asyncio.Event()

    def connect(self, sink: Session) -> int:
        return ID

    def disconnect(self, session: int) -> None:
        assert session == ID
        self.events.append("disconnect")

    def submit(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    async def hears(self, count: int) -> None:
        while len(self.events) < count:
            self._changed.clear()
            await self._changed.wait()


class Ended(Exception):
    """What gRPC raises in a handler that aborts."""


class FakeContext:
    """A peer: what it says is put in, what it reads comes out. It may stop reading."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self.heard: asyncio.Queue[bytes] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        self.status: grpc.Status | None = None

    def peer(self) -> str:
        return f"ipv4:10.0.0.7:{id(self)}"

    def says(self, message: Any) -> None:
        self._said.put_nowait(
            message.SerializeToString() if hasattr(message, "SerializeToString") else message
        )

    async def read(self) -> Any:
        return await self._said.get()

    async def write(self, data: bytes) -> None:
        await self.reads.wait()
        self.heard.put_nowait(data)

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.status = status
        raise Ended


class Stream:
    """A session that is being served."""

    def __init__(
        self, max_unsent: int = 3, max_unsent_bytes: int = 1_000_000, join_turns: JoinTurns | None = None
    ) -> None:
        self.driver = FakeDriver()
        self.context = FakeContext()
        driver: Any = self.driver
        self.session = Session(driver, max_unsent, max_unsent_bytes=max_unsent_bytes, join_turns=join_turns)
        self.serving: asyncio.Task[None]

    def start(self) -> None:
        self.serving = asyncio.create_task(self.session.serve(self.context, hello_timeout=10.0))

    def deliver(self, message: Any = None, data: bytes = b"x") -> None:
        self.session.deliver(Outgoing(message, lambda _: data))

    async def ends(self) -> grpc.Status | None:
        """Wait for the end of the stream; its status, None for OK."""
        try:
            await self.serving
        except Ended:
            assert self.context.status is not None
        assert self.driver.events[-2:] == ["disconnect", Disconnected(ID)], "the driver knows"
        return self.context.status


@asynccontextmanager
async def stream(
    max_unsent: int = 3,
    max_unsent_bytes: int = 1_000_000,
    *,
    hello: bool = True,
    run_id: str = "job",
    join_turns: JoinTurns | None = None,
) -> AsyncIterator[Stream]:
    opened = Stream(max_unsent, max_unsent_bytes, join_turns)
    opened.start()
    if hello:
        opened.context.says(
            session_pb2.ConnectRequest(hello=session_pb2.Hello(run_id=run_id, protocol_version=1))
        )
        await opened.driver.hears(1)
    yield opened
    opened.serving.cancel()
    await asyncio.wait({opened.serving})


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class TestJoinsOfOneRun:
    """Those beyond ``MAX_JOINS`` wait, so that the other runs need not wait for all of them."""

    async def test_join_waits_until_an_earlier_one_of_its_run_is_answered(self):
        turns = JoinTurns(most=1)
        async with stream(join_turns=turns) as one, stream(join_turns=turns) as other:
            one.context.says(JOIN)
            await one.driver.hears(2)
            other.context.says(JOIN)
            other.context.says(ARRIVE)
            await settle()
            assert len(other.driver.events) == 1, "it says nothing, in order, until its join may go"
            one.deliver(GroupJoined("ckpt", ()))
            await other.driver.hears(3)
            assert [type(event) for event in other.driver.events] == [Hello, JoinGroup, Arrive]

    async def test_refused_join_ends_its_turn(self):
        turns = JoinTurns(most=1)
        async with stream(join_turns=turns) as one, stream(join_turns=turns) as other:
            one.context.says(JOIN)
            await one.driver.hears(2)
            one.deliver(Refused(Refusal(Reason.INVALID_ARGUMENT, "no"), "ckpt"))
            other.context.says(JOIN)
            await other.driver.hears(2)

    async def test_stream_that_ends_gives_its_turn_back_and_one_that_waited_takes_none(self):
        turns = JoinTurns(most=1)
        async with stream(join_turns=turns) as one, stream(join_turns=turns) as other:
            one.context.says(JOIN)
            await one.driver.hears(2)
            async with stream(join_turns=turns) as waiting:
                waiting.context.says(JOIN)
                await settle()
            assert len(waiting.driver.events) == 3, "a Hello and the end"
            one.serving.cancel()
            other.context.says(JOIN)
            await other.driver.hears(2)

    async def test_join_that_waits_for_its_turn_does_not_keep_its_bytes(self):
        """Many wait at once, and each list of participants may have 200 KB."""
        turns = JoinTurns(most=1)
        async with stream(join_turns=turns) as one, stream(join_turns=turns) as other:
            one.context.says(JOIN)
            await one.driver.hears(2)
            data = JOIN.SerializeToString()
            users = sys.getrefcount(data)
            other.context.says(data)
            await settle()
            assert len(other.driver.events) == 1, "it waits"
            assert sys.getrefcount(data) == users

    async def test_stream_joins_several_groups_before_the_first_answer(self):
        async with stream(join_turns=JoinTurns(most=1)) as one:
            one.context.says(JOIN)
            one.context.says(JOIN)
            await one.driver.hears(3)

    async def test_join_of_another_run_waits_for_nobody(self):
        turns = JoinTurns(most=1)
        async with stream(join_turns=turns) as one, stream(join_turns=turns, run_id="job2") as other:
            one.context.says(JOIN)
            await one.driver.hears(2)
            other.context.says(JOIN)
            await other.driver.hears(2)


async def test_what_comes_in_goes_to_the_driver_in_order():
    async with stream() as one:
        one.context.says(GOODBYE)
        await one.ends()
        assert one.driver.events == [
            Hello(ID, "job", 0, ()),
            Goodbye(ID, "done"),
            "disconnect",
            Disconnected(ID),
        ]


async def test_nobody_is_sent_away_for_being_asked_too_often():
    async with stream() as one:
        one.context.reads.clear()
        for number in range(10):
            one.deliver(Inspect(number))
        one.deliver(Welcome(1, 1.0, 1, ()))
        one.context.reads.set()
        one.context.says(GOODBYE)
        assert await one.ends() is None


async def test_what_a_process_does_goes_past_the_driver():
    heard: list[tuple[int, Inspected]] = []
    async with stream() as one:
        one.session._heard = lambda session, answer: heard.append((session, answer))
        answer = Inspected(question=7, rank=3)
        one.context.says(session_pb2.ConnectRequest(inspected=answer))
        one.context.says(GOODBYE)
        await one.ends()
        assert heard == [(ID, answer)]
        assert not any(isinstance(event, Inspected) for event in one.driver.events)


async def test_what_is_delivered_goes_out_in_order():
    async with stream() as one:
        for data in (b"a", b"b", b"c"):
            one.deliver(data=data)
        assert [await one.context.heard.get() for _ in range(3)] == [b"a", b"b", b"c"]
        one.deliver(data=b"d")
        assert await one.context.heard.get() == b"d"


async def test_a_goodbye_ends_the_stream_with_ok_once_all_is_sent():
    async with stream() as one:
        one.context.reads.clear()
        one.deliver(data=b"last")
        one.context.says(GOODBYE)
        await one.driver.hears(2)
        await settle()
        assert not one.serving.done()
        one.context.reads.set()
        assert await one.ends() is None
        assert one.context.heard.get_nowait() == b"last"


async def test_a_goodbye_that_comes_too_late_is_not_taken_for_heard():
    """Its process says it again to the next coordinator, only if the stream does not end well."""
    async with stream() as one:
        one.driver.retired = True
        one.context.says(GOODBYE)
        assert_refused(await one.ends(), Reason.COORDINATOR_DRAINING)
        assert not any(isinstance(event, Goodbye) for event in one.driver.events)


async def test_nothing_is_said_behind_the_end():
    over = Refusal(Reason.RUN_FORGOTTEN, "the run is gone")
    async with stream() as one:
        one.context.reads.clear()
        one.deliver(Refused(over, final=True), b"over")
        one.deliver(Refused(Refusal(Reason.HELLO_REQUIRED, "who are you?"), "p", 3), b"confusing")
        one.context.reads.set()
        assert_refused(await one.ends(), Reason.RUN_FORGOTTEN)
        assert (one.context.heard.get_nowait(), one.context.heard.empty()) == (b"over", True)


async def test_a_half_closed_stream_lives_on():
    async with stream() as one:
        one.context.says(grpc.aio.EOF)
        await settle()
        one.deliver(data=b"decided")
        assert await one.context.heard.get() == b"decided"
        assert not one.serving.done()
        assert one.driver.events == [Hello(ID, "job", 0, ())]


async def test_a_stream_that_is_closed_before_it_said_anything_is_refused():
    async with stream(hello=False) as one:
        one.context.says(grpc.aio.EOF)
        assert_refused(await one.ends(), Reason.HELLO_REQUIRED)


@in_virtual_time
async def test_a_peer_that_says_no_hello_is_refused_after_the_timeout():
    async with stream(hello=False) as one:
        status = some(await one.ends())
        assert asyncio.get_running_loop().time() == START + 10
        assert_refused(status, Reason.HELLO_REQUIRED)
        assert "no Hello came within 10 s" in status.details


@in_virtual_time
async def test_the_timeout_is_for_the_first_message_alone():
    async with stream() as one:
        await asyncio.sleep(3600)
        assert not one.serving.done()


async def test_garbage_ends_the_stream():
    async with stream() as one:
        one.context.says(b"\xff\xfe")
        assert_refused(await one.ends(), Reason.INVALID_ARGUMENT)


async def test_a_final_refusal_is_sent_and_is_the_status():
    refusal = Refusal(Reason.STALE_GENERATION, "a newer one runs.")
    async with stream() as one:
        one.deliver(Refused(refusal, final=True), b"refused")
        assert_refused(await one.ends(), Reason.STALE_GENERATION)
        assert one.context.heard.get_nowait() == b"refused"


async def test_another_refusal_ends_nothing():
    async with stream() as one:
        one.deliver(Refused(Refusal(Reason.NOT_JOINED, "join first."), "ckpt"), b"refused")
        assert await one.context.heard.get() == b"refused"
        assert not one.serving.done()


async def test_a_peer_that_does_not_read_is_cut_off():
    async with stream(max_unsent=3) as one:
        one.context.reads.clear()
        for _ in range(1 + 3):  # one on its way, three that wait
            one.deliver()
            await settle()
        assert not one.serving.done()
        one.deliver()
        assert_refused(await one.ends(), Reason.SLOW_CONSUMER)
        assert one.context.heard.empty()


async def test_connection_is_ended_when_no_status_can_reach_the_peer():
    """gRPC sends no status behind a message that is not taken, and keeps that message while connected."""
    ended: list[str] = []

    async def end(peer: str) -> None:
        ended.append(peer)

    writes = Writes(log_slow_reader, end=end)
    servicer = SessionServicer(FakeDriver(), max_unsent=1, writes=writes)  # type: ignore[arg-type]
    contexts = [FakeContext() for _ in range(2)]
    serving = [asyncio.create_task(servicer.connect(None, contexts[0]))]
    await settle()
    (stuck,) = servicer.sessions
    serving.append(asyncio.create_task(servicer.connect(None, contexts[1])))
    await settle()
    (idle,) = servicer.sessions - {stuck}
    contexts[0].reads.clear()
    for _ in range(3):
        stuck.deliver(Outgoing(None, lambda _: b"x"))  # type: ignore[arg-type]
        await settle()
    idle.cut_off()
    await asyncio.wait(serving)
    assert ended == [contexts[0].peer()]
    assert_refused(contexts[0].status, Reason.SLOW_CONSUMER)
    assert_refused(contexts[1].status, Reason.SLOW_CONSUMER)


async def test_peer_is_cut_off_by_name_for_bytes_that_it_does_not_read():
    processes = [session_pb2.Process(rank=rank, incarnation="i", host="host-a", pid=1) for rank in (3, 4)]
    hello = session_pb2.Hello(run_id="job", protocol_version=1, processes=processes)
    async with stream(max_unsent=1_000, max_unsent_bytes=100, hello=False) as one:
        one.context.says(session_pb2.ConnectRequest(hello=hello))
        await one.driver.hears(1)
        one.context.reads.clear()
        one.deliver(data=bytes(100))  # on its way
        await settle()
        one.deliver(data=bytes(101))  # One may wait, however large.
        await settle()
        assert not one.serving.done()
        one.deliver(data=b"x")
        status = some(await one.ends())
        assert_refused(status, Reason.SLOW_CONSUMER)
        assert "messages of 101 bytes were waiting for run job, rank 3-4 on host-a to read" in status.details
        assert one.session.unsent_bytes == 0


async def test_name_of_a_peer_in_a_refusal_is_short_whatever_it_says_of_itself():
    processes = [session_pb2.Process(rank=2 * rank, host="h" * 1_000) for rank in range(1_000)]
    for hello in (
        session_pb2.Hello(run_id="r" * 1_000, protocol_version=1, processes=processes),
        session_pb2.Hello(run_id="r" * 1_000, protocol_version=1, relay="r" * 1_000),
    ):
        async with stream(max_unsent=1, hello=False) as one:
            one.context.says(session_pb2.ConnectRequest(hello=hello))
            await one.driver.hears(1)
            one.session.cut_off()
            assert len(some(await one.ends()).details) < 500


async def test_session_with_most_unsent_bytes_makes_room_for_all():
    servicer = SessionServicer(FakeDriver())  # type: ignore[arg-type]
    servicer._queued = Queued(most=3 * SMALL)
    contexts = [FakeContext() for _ in range(2)]
    serving = [asyncio.create_task(servicer.connect(None, context)) for context in contexts]
    await settle()
    for context in contexts:
        context.reads.clear()
    slow, other = servicer.sessions
    for data in (bytes(SMALL + 1), bytes(SMALL + 2), bytes(SMALL + 3)):
        slow.deliver(Outgoing(None, lambda _, data=data: data))  # type: ignore[arg-type, misc]
        await settle()
    assert not any(task.done() for task in serving)
    other.deliver(Outgoing(None, lambda _: bytes(SMALL + 4)))  # type: ignore[arg-type]
    other.deliver(Outgoing(None, lambda _: bytes(SMALL + 5)))  # type: ignore[arg-type]
    await settle()
    assert [session._cut_off for session in (slow, other)] == [True, False]
    assert not other._closed
    for task in serving:
        task.cancel()
    await asyncio.wait(serving)
    assert servicer._queued.bytes == 0


async def test_message_for_many_relays_is_in_memory_once():
    servicer = SessionServicer(FakeDriver())  # type: ignore[arg-type]
    contexts = [FakeContext() for _ in range(3)]
    serving = [asyncio.create_task(servicer.connect(None, context)) for context in contexts]
    await settle()
    decision = bytes(SMALL + 1)
    for number, session in enumerate(servicer.sessions):
        session.deliver(Outgoing(None, lambda _: decision), {number})  # type: ignore[arg-type]
    assert servicer._queued.bytes == len(decision)
    await settle()
    heard = {context.heard.get_nowait() for context in contexts}
    assert heard == {decision + codec.encode_ranks({number}) for number in range(3)}
    for task in serving:
        task.cancel()
    await asyncio.wait(serving)


async def test_message_that_waits_for_room_counts_as_unsent():
    writes = Writes(log_slow_reader, most=SMALL)
    servicer = SessionServicer(FakeDriver(), writes=writes)  # type: ignore[arg-type]
    contexts = [FakeContext() for _ in range(2)]
    serving = [asyncio.create_task(servicer.connect(None, context)) for context in contexts]
    await settle()
    for context in contexts:
        context.reads.clear()
    writing, waiting = servicer.sessions
    for session, data in ((writing, bytes(SMALL + 1)), (waiting, bytes(SMALL + 2))):
        session.deliver(Outgoing(None, lambda _, data=data: data))  # type: ignore[arg-type, misc]
        await settle()
    assert servicer._queued.bytes == waiting.unsent_bytes == SMALL + 2
    waiting.cut_off()
    for context in contexts:
        context.reads.set()
    await settle()
    assert [context.heard.qsize() for context in contexts].count(0) == 1
    for task in serving:
        task.cancel()
    await asyncio.wait(serving)
    assert (servicer._queued.bytes, writes.held) == (0, 0)


async def test_it_is_cut_off_once_however_much_more_is_delivered():
    async with stream(max_unsent=3) as one:
        one.context.reads.clear()
        for _ in range(20):
            one.deliver()
        one.session.drain()
        assert_refused(await one.ends(), Reason.SLOW_CONSUMER)
        one.session.drain()


async def test_a_peer_that_reads_is_not_cut_off_by_a_burst_within_its_bound():
    async with stream(max_unsent=3) as one:
        for _ in range(5):
            for _ in range(3):
                one.deliver()
            await settle()
        assert one.context.heard.qsize() == 15
        assert not one.serving.done()


async def test_a_drain_asks_to_connect_again_and_ends_the_stream():
    async with stream() as one:
        one.deliver(data=b"decided")
        one.session.drain()
        assert_refused(await one.ends(), Reason.COORDINATOR_DRAINING)
        assert [one.context.heard.get_nowait() for _ in range(2)] == [b"decided", codec.DRAIN]


async def test_a_call_that_breaks_is_a_disconnection():
    async with stream() as one:
        one.serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one.ends()
        assert one.driver.events[-2:] == ["disconnect", Disconnected(ID)]


async def test_a_write_that_fails_is_a_disconnection(monkeypatch: pytest.MonkeyPatch):
    async def broken(data: bytes) -> None:
        raise grpc.aio.InternalError("the stream is gone")

    async with stream() as one:
        monkeypatch.setattr(one.context, "write", broken)
        one.deliver()
        with pytest.raises(grpc.aio.InternalError):
            await one.ends()
        assert one.driver.events[-2:] == ["disconnect", Disconnected(ID)]


# ---------------------------------------------------------------------- as whom it was admitted


async def test_a_hello_for_a_run_that_the_caller_may_not_touch_reaches_nobody():
    grant = Grant(name="ci", role=Role.WORKER, runs=("other-*",), digest=b"")
    before = ADMISSION.set(Admission(grant))
    try:
        async with stream(hello=False) as one:
            one.context.says(HELLO)
            assert_refused(await one.ends(), Reason.RUN_NOT_ALLOWED)
            assert one.driver.events == ["disconnect", Disconnected(ID)]
    finally:
        ADMISSION.reset(before)


async def test_a_hello_that_comes_late_is_checked_too():
    grant = Grant(name="ci", role=Role.WORKER, runs=("other-*",), digest=b"")
    before = ADMISSION.set(Admission(grant))
    try:
        async with stream(hello=False) as one:
            one.context.says(session_pb2.ConnectRequest(join_group=session_pb2.JoinGroup(prefix="p")))
            one.context.says(HELLO)
            assert_refused(await one.ends(), Reason.RUN_NOT_ALLOWED)
            assert not any(isinstance(event, Hello) for event in one.driver.events)
    finally:
        ADMISSION.reset(before)


# ---------------------------------------------------------------------- the servicer


async def test_the_servicer_knows_its_sessions_and_drains_them_all():
    driver = FakeDriver()
    servicer = SessionServicer(driver)  # type: ignore[arg-type]
    contexts = [FakeContext() for _ in range(3)]
    calls = [asyncio.create_task(servicer.connect(None, context)) for context in contexts]
    await settle()
    assert len(servicer.sessions) == 3
    servicer.drain()
    await asyncio.wait(calls)
    assert servicer.sessions == set()
    for call, context in zip(calls, contexts, strict=True):
        assert isinstance(call.exception(), Ended)
        assert_refused(context.status, Reason.COORDINATOR_DRAINING)


async def test_streams_that_have_not_said_hello_are_bounded_too():
    servicer = SessionServicer(FakeDriver(), max_open=2)  # type: ignore[arg-type]
    calls = [asyncio.create_task(servicer.connect(None, FakeContext())) for _ in range(2)]
    await settle()
    with pytest.raises(Refusal) as caught:
        await servicer.connect(None, FakeContext())
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    servicer.drain()
    for call in calls:
        with pytest.raises(Ended):
            await call


async def test_who_is_welcomed_hears_of_the_replicas_as_they_are_then():
    replicas = ["a:1"]
    servicer = SessionServicer(FakeDriver(), replicas=lambda: replicas, keepalive_ms=900)  # type: ignore[arg-type]
    context = FakeContext()
    call = asyncio.create_task(servicer.connect(None, context))
    await settle()
    replicas.append("b:1")
    for session in servicer.sessions:
        session.deliver(Outgoing(Welcome(3, 10.0, 1, (7,)), codec.encode_session_message))
    welcome = session_pb2.ConnectResponse.FromString(await context.heard.get()).welcome
    assert (welcome.epoch, list(welcome.replicas), welcome.keepalive_ms) == (3, ["a:1", "b:1"], 900)
    call.cancel()
    await asyncio.wait({call})


async def test_a_draining_servicer_takes_no_more():
    servicer = SessionServicer(FakeDriver())  # type: ignore[arg-type]
    servicer.drain()
    with pytest.raises(Refusal) as caught:
        await servicer.connect(None, FakeContext())
    assert caught.value.reason is Reason.COORDINATOR_DRAINING
    assert servicer.sessions == set()


# ---------------------------------------------------------------------- relays


class Coordinator:
    """A whole one but for the network."""

    def __init__(self) -> None:
        self.driver = Driver(
            MemoryEngine(),
            clock=LoopClock(),
            observer=Observers(),
            encode=codec.encode_session_message,
            session_ttl=10.0,
            limits=Limits(),
        )
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
        self.says(enter=session_pb2.Enter(processes=[a_process(rank) for rank in ranks]))
        return list((await self.hears()).entered.entries)

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
async def test_a_relay_is_told_for_which_ranks_and_others_get_the_bytes_as_they_are():
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
        told = session_pb2.ConnectResponse.FromString(appended)
        assert (told.decision.outcome, list(told.ranks)) == (common_pb2.OUTCOME_RELEASED, [0, 1])
        assert not session_pb2.ConnectResponse.FromString(shared).ranks


@in_virtual_time
async def test_a_relays_processes_part_and_are_answered_once_it_is_durable():
    async with a_coordinator() as coordinator:
        relay = await coordinator.peer(relay="node")
        await relay.enters(0, 1)
        relay.says(part=session_pb2.Part(ranks=[1, 9], goodbye=session_pb2.Goodbye(reason="done")))
        relay.says(part=session_pb2.Part(ranks=[0]))
        assert [list((await relay.hears()).parted.ranks) for _ in range(2)] == [[1, 9], [0]]
        relay.says(goodbye=session_pb2.Goodbye())
        await relay.serving


@in_virtual_time
async def test_what_is_for_relays_disturbs_no_other_stream():
    async with a_coordinator() as coordinator:
        own = await coordinator.peer(processes=[a_process(2)])
        for message in ({"enter": session_pb2.Enter()}, {"part": session_pb2.Part(ranks=[2])}):
            refusal = await own.is_refused(**message)
            assert (refusal.code, refusal.HasField("rank")) == (3, False)
        group = session_pb2.JoinGroup(prefix="ckpt", world_size=4)
        own.says(join_group=group)
        assert (await own.hears()).HasField("group_joined")


@in_virtual_time
async def test_an_enter_before_the_hello_is_refused():
    async with a_coordinator() as coordinator:
        peer = Peer(coordinator.servicer)
        coordinator.peers.append(peer)
        refusal = await peer.is_refused(enter=session_pb2.Enter(processes=[a_process(0)]))
        assert "the first message of a session must be a Hello" in refusal.message
        assert coordinator.driver.coordinator.runs == {}


@in_virtual_time
async def test_a_relay_that_names_a_rank_twice_or_nonsense_hears_of_each():
    async with a_coordinator() as coordinator:
        relay = await coordinator.peer(relay="node")
        entries = await relay.enters(0, 0, -5, 70_000, 1)
        assert [entry.refusal.code for entry in entries] == [0, 3, 3, 3, 0]
        assert await relay.enters() == []


@in_virtual_time
async def test_a_relay_that_speaks_garbage_loses_its_stream_and_its_processes_may_come_back():
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
async def test_a_relay_may_be_answered_for_each_of_its_ranks_at_once():
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


def assert_refused(status: grpc.Status | None, reason: Reason) -> None:
    """The status is that of a refusal for this reason."""
    assert status is not None
    assert status.code is errors.CODES[reason]
    ((_, data),) = status.trailing_metadata
    assert reason.name.encode() in data
