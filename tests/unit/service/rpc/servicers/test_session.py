"""A session carries messages between a stream and the driver."""

import asyncio
import sys

import grpc
import pytest

from muster.service.core.vocabulary.effects import GroupJoined, Inspect, Refused, Welcome
from muster.service.core.vocabulary.events import Arrive, Disconnected, Goodbye, Hello, JoinGroup
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.driver import Outgoing
from muster.service.rpc import codec
from muster.service.rpc.interceptors.guard import Admission
from muster.service.rpc.join_turns import MIN_WEIGHT, JoinTurns
from muster.service.rpc.servicers.session import SessionServicer
from muster.service.security.grants import Grant, Role
from muster.v1 import session_pb2
from muster.v1.insight_pb2 import Inspected
from tests.support.admitted import admitted
from tests.support.expect import some
from tests.support.world.session_world import (
    ARRIVE,
    GOODBYE,
    HELLO,
    ID,
    JOIN,
    Ended,
    FakeContext,
    FakeDriver,
    assert_refused,
    settle,
    stream,
)
from tests.support.world.virtual_time import START, in_virtual_time


def join_of(ranks):
    """A join of so many ranks."""
    join = session_pb2.JoinGroup(prefix="ckpt", world_size=100, ranks=range(ranks))
    return session_pb2.ConnectRequest(join_group=join)


class TestJoinsOfOneRun:
    """Those beyond ``MAX_RANKS`` wait, so that the other runs need not wait for all of them."""

    async def test_join_waits_for_an_earlier_join_of_its_run(self):
        turns = JoinTurns(max_ranks=1)
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
        turns = JoinTurns(max_ranks=1)
        async with stream(join_turns=turns) as one, stream(join_turns=turns) as other:
            one.context.says(JOIN)
            await one.driver.hears(2)
            one.deliver(Refused(Refusal(Reason.INVALID_ARGUMENT, "no"), "ckpt"))
            other.context.says(JOIN)
            await other.driver.hears(2)

    async def test_ended_stream_gives_its_turn_back(self):
        turns = JoinTurns(max_ranks=1)
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
        turns = JoinTurns(max_ranks=1)
        async with stream(join_turns=turns) as one, stream(join_turns=turns) as other:
            one.context.says(JOIN)
            await one.driver.hears(2)
            data = JOIN.SerializeToString()
            users = sys.getrefcount(data)
            other.context.says(data)
            await settle()
            assert len(other.driver.events) == 1, "it waits"
            assert sys.getrefcount(data) == users

    async def test_large_join_waits_for_the_small_ones_before_it(self):
        turns = JoinTurns(max_ranks=2 * MIN_WEIGHT)
        async with (
            stream(join_turns=turns) as one,
            stream(join_turns=turns) as other,
            stream(join_turns=turns) as large,
        ):
            for small in (one, other):
                small.context.says(JOIN)
                await small.driver.hears(2)
            large.context.says(join_of(3 * MIN_WEIGHT))
            one.deliver(GroupJoined("ckpt", ()))
            await settle()
            assert len(large.driver.events) == 1, "another small one is still open"
            other.deliver(GroupJoined("ckpt", ()))
            await large.driver.hears(2)

    async def test_small_join_waits_for_a_large_one(self):
        turns = JoinTurns(max_ranks=2 * MIN_WEIGHT)
        async with stream(join_turns=turns) as large, stream(join_turns=turns) as small:
            large.context.says(join_of(3 * MIN_WEIGHT))
            await large.driver.hears(2)
            small.context.says(JOIN)
            await settle()
            assert len(small.driver.events) == 1
            large.deliver(GroupJoined("ckpt", ()))
            await small.driver.hears(2)

    async def test_join_that_was_cancelled_leaves_the_queue(self):
        turns = JoinTurns(max_ranks=2 * MIN_WEIGHT)
        async with stream(join_turns=turns) as one, stream(join_turns=turns) as other:
            one.context.says(JOIN)
            await one.driver.hears(2)
            async with stream(join_turns=turns) as large:
                large.context.says(join_of(3 * MIN_WEIGHT))
                await settle()
            other.context.says(join_of(MIN_WEIGHT))
            await other.driver.hears(2)

    async def test_second_join_of_a_stream_waits_for_the_answer_to_the_first(self):
        """A relay may join with few ranks at first, and then with many."""
        async with stream(join_turns=JoinTurns(max_ranks=MIN_WEIGHT)) as one:
            one.context.says(JOIN)
            one.context.says(join_of(MIN_WEIGHT))
            await one.driver.hears(2)
            await settle()
            assert len(one.driver.events) == 2
            one.deliver(GroupJoined("ckpt", ()))
            await one.driver.hears(3)

    async def test_join_of_another_run_does_not_wait(self):
        turns = JoinTurns(max_ranks=1)
        async with stream(join_turns=turns) as one, stream(join_turns=turns, run_id="job2") as other:
            one.context.says(JOIN)
            await one.driver.hears(2)
            other.context.says(JOIN)
            await other.driver.hears(2)


async def test_stream_that_waits_keeps_no_message():
    """Thousands of streams wait for hours, and the last message of each may have had a large payload."""
    async with stream() as one:
        data = ARRIVE.SerializeToString()
        users = sys.getrefcount(data)
        one.context.says(data)
        await one.driver.hears(2)
        await settle()
        control = [object()]
        assert sys.getrefcount(one.driver.events[1]) == sys.getrefcount(control[0])
        assert sys.getrefcount(data) == users


async def test_messages_go_to_the_driver_in_order():
    async with stream() as one:
        one.context.says(GOODBYE)
        await one.ends()
        assert one.driver.events == [
            Hello(ID, "job", 0, ()),
            Goodbye(ID, "done"),
            "disconnect",
            Disconnected(ID),
        ]


async def test_question_never_cuts_off_a_slow_peer():
    async with stream() as one:
        one.context.reads.clear()
        for number in range(10):
            one.deliver(Inspect(number))
        one.deliver(Welcome(1, 1.0, 1, ()))
        one.context.reads.set()
        one.context.says(GOODBYE)
        assert await one.ends() is None


async def test_answer_to_an_inspection_bypasses_the_driver():
    heard: list[tuple[int, Inspected]] = []
    async with stream() as one:
        one.session._on_inspected = lambda session, answer: heard.append((session, answer))
        answer = Inspected(question=7, rank=3)
        one.context.says(session_pb2.ConnectRequest(inspected=answer))
        one.context.says(GOODBYE)
        await one.ends()
        assert heard == [(ID, answer)]
        assert not any(isinstance(event, Inspected) for event in one.driver.events)


async def test_messages_to_the_peer_are_sent_in_order():
    async with stream() as one:
        for data in (b"a", b"b", b"c"):
            one.deliver(data=data)
        assert [await one.context.heard.get() for _ in range(3)] == [b"a", b"b", b"c"]
        one.deliver(data=b"d")
        assert await one.context.heard.get() == b"d"


async def test_goodbye_ends_the_stream_with_ok_once_all_is_sent():
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


async def test_late_goodbye_is_refused():
    """Its process says it again to the next coordinator, only if the stream does not end well."""
    async with stream() as one:
        one.driver.retired = True
        one.context.says(GOODBYE)
        assert_refused(await one.ends(), Reason.COORDINATOR_DRAINING)
        assert not any(isinstance(event, Goodbye) for event in one.driver.events)


async def test_nothing_is_sent_after_the_end():
    over = Refusal(Reason.RUN_FORGOTTEN, "the run is gone")
    async with stream() as one:
        one.context.reads.clear()
        one.deliver(Refused(over, final=True), b"over")
        one.deliver(Refused(Refusal(Reason.HELLO_REQUIRED, "who are you?"), "p", 3), b"confusing")
        one.context.reads.set()
        assert_refused(await one.ends(), Reason.RUN_FORGOTTEN)
        assert (one.context.heard.get_nowait(), one.context.heard.empty()) == (b"over", True)


async def test_half_closed_stream_lives_on():
    async with stream() as one:
        one.context.says(grpc.aio.EOF)
        await settle()
        one.deliver(data=b"decided")
        assert await one.context.heard.get() == b"decided"
        assert not one.serving.done()
        assert one.driver.events == [Hello(ID, "job", 0, ())]


async def test_stream_that_closes_without_a_message_is_refused():
    async with stream(hello=False) as one:
        one.context.says(grpc.aio.EOF)
        assert_refused(await one.ends(), Reason.HELLO_REQUIRED)


@in_virtual_time
async def test_peer_that_says_no_hello_is_refused_after_the_timeout():
    async with stream(hello=False) as one:
        status = some(await one.ends())
        assert asyncio.get_running_loop().time() == START + 10
        assert_refused(status, Reason.HELLO_REQUIRED)
        assert "no Hello came within 10 s" in status.details


@in_virtual_time
async def test_timeout_is_for_the_first_message_alone():
    async with stream() as one:
        await asyncio.sleep(3600)
        assert not one.serving.done()


async def test_garbage_ends_the_stream():
    async with stream() as one:
        one.context.says(b"\xff\xfe")
        assert_refused(await one.ends(), Reason.INVALID_ARGUMENT)


async def test_final_refusal_is_sent_and_is_the_status():
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


async def test_drain_asks_to_connect_again_and_ends_the_stream():
    async with stream() as one:
        one.deliver(data=b"decided")
        one.session.drain()
        assert_refused(await one.ends(), Reason.COORDINATOR_DRAINING)
        assert [one.context.heard.get_nowait() for _ in range(2)] == [b"decided", codec.DRAIN]


async def test_call_that_breaks_is_a_reset():
    async with stream() as one:
        one.serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await one.ends()
        assert one.driver.events[-2:] == ["disconnect", Disconnected(ID, reset=True)]


async def test_write_that_fails_is_a_reset(monkeypatch: pytest.MonkeyPatch):
    async def broken(data: bytes) -> None:
        raise grpc.aio.InternalError("the stream is gone")

    async with stream() as one:
        monkeypatch.setattr(one.context, "write", broken)
        one.deliver()
        with pytest.raises(grpc.aio.InternalError):
            await one.ends()
        assert one.driver.events[-2:] == ["disconnect", Disconnected(ID, reset=True)]


# ---------------------------------------------------------------------- the admitted caller


async def test_hello_for_a_forbidden_run_does_not_reach_the_driver():
    grant = Grant(name="ci", role=Role.WORKER, runs=("other-*",), digest=b"")
    with admitted(Admission(grant)):
        async with stream(hello=False) as one:
            one.context.says(HELLO)
            assert_refused(await one.ends(), Reason.RUN_NOT_ALLOWED)
            assert one.driver.events == ["disconnect", Disconnected(ID)]


async def test_late_hello_is_checked_as_well():
    grant = Grant(name="ci", role=Role.WORKER, runs=("other-*",), digest=b"")
    with admitted(Admission(grant)):
        async with stream(hello=False) as one:
            one.context.says(session_pb2.ConnectRequest(join_group=session_pb2.JoinGroup(prefix="p")))
            one.context.says(HELLO)
            assert_refused(await one.ends(), Reason.RUN_NOT_ALLOWED)
            assert not any(isinstance(event, Hello) for event in one.driver.events)


# ---------------------------------------------------------------------- the servicer


async def test_servicer_drains_all_its_sessions():
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


async def test_streams_without_a_hello_count_for_the_limit():
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


async def test_welcome_lists_the_replicas_of_that_moment():
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


async def test_draining_servicer_takes_no_more():
    servicer = SessionServicer(FakeDriver())  # type: ignore[arg-type]
    servicer.drain()
    with pytest.raises(Refusal) as caught:
        await servicer.connect(None, FakeContext())
    assert caught.value.reason is Reason.COORDINATOR_DRAINING
    assert servicer.sessions == set()
