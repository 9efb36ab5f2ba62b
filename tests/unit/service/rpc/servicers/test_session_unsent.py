"""Sessions of peers that do not read: each is cut off at its limit."""

import asyncio

from muster.service.core.vocabulary.events import Disconnected
from muster.service.core.vocabulary.refusal import Reason
from muster.service.driver import Outgoing
from muster.service.rpc import codec
from muster.service.rpc.interceptors.unsent import log_slow_reader
from muster.service.rpc.servicers.session import SessionServicer
from muster.serving.budget import SMALL
from muster.serving.writes import Writes
from muster.v1 import session_pb2
from tests.support.expect import some
from tests.support.world.session_world import (
    HELLO,
    ID,
    FakeContext,
    FakeDriver,
    assert_refused,
    settle,
    stream,
)
from tests.support.world.virtual_time import in_virtual_time


async def test_peer_that_does_not_read_is_cut_off():
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


async def test_refusal_names_a_peer_that_leaves_bytes_unread():
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


async def test_name_of_a_peer_in_a_refusal_is_short():
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
    servicer = SessionServicer(FakeDriver(), max_queued_bytes=3 * SMALL)  # type: ignore[arg-type]
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
    assert not other._outbox.closed
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


async def test_slow_peer_is_cut_off_once():
    async with stream(max_unsent=3) as one:
        one.context.reads.clear()
        for _ in range(20):
            one.deliver()
        one.session.drain()
        assert_refused(await one.ends(), Reason.SLOW_CONSUMER)
        one.session.drain()


async def test_peer_that_reads_is_not_cut_off_by_a_burst_within_its_bound():
    async with stream(max_unsent=3) as one:
        for _ in range(5):
            for _ in range(3):
                one.deliver()
            await settle()
        assert one.context.heard.qsize() == 15
        assert not one.serving.done()


@in_virtual_time
async def test_connection_of_a_slow_reader_that_another_reader_needs_ended_is_no_reset():
    """The coordinator ended it, so the process has the session TTL to come back."""

    async def end(peer: str) -> None:
        serving.cancel()  # As gRPC does when the connection is gone.

    size = SMALL + 1
    writes = Writes(log_slow_reader, most=size, end=end)
    driver, context = FakeDriver(), FakeContext()
    servicer = SessionServicer(driver, writes=writes)  # type: ignore[arg-type]
    serving = asyncio.create_task(servicer.connect(None, context))
    context.says(HELLO)
    await driver.hears(1)
    (session,) = servicer.sessions
    context.reads.clear()
    session.deliver(Outgoing(None, lambda _: bytes(size)))  # type: ignore[arg-type]
    await settle()
    other = asyncio.ensure_future(writes.write(FakeContext(), size, lambda: bytes(size), lambda: "other"))
    await asyncio.wait({serving})
    assert driver.events[-1] == Disconnected(ID, reset=False)
    context.reads.set()
    await other
