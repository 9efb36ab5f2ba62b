"""Attacks by calls: requests that are large, compressed or broken, and calls that the caller may not make."""

import asyncio
import random
from contextlib import suppress
from typing import Any

import grpc

from lab.hostile.attacker import (
    CONNECT,
    LARGE,
    OWN_RUN,
    TEAM_RUN,
    Attacker,
    status_of,
    together,
)
from muster.v1 import (
    barrier_pb2,
    insight_pb2,
    rendezvous_pb2,
    run_pb2,
    session_pb2,
    store_pb2,
)

CHECK = "/grpc.health.v1.Health/Check"
ARRIVE = "/muster.v1.BarrierService/Arrive"
SET = "/muster.v1.StoreService/Set"
MESSAGE = 16 << 20
"""Bytes of the largest message that a coordinator takes by default, but for some headers."""
MADE_UP = (
    "made-up-0123456789abcdef",
    "x" * 7_001,
    # A token of an issuer, by its form; no key has signed it.
    "eyJhbGciOiJSUzI1NiIsImtpZCI6Im5vbmUifQ.eyJpc3MiOiJodHRwczovL2EifQ.c2lnbmF0dXJl",
)


def hello(run_id: str, *, rank: int = 0, generation: int = 0) -> bytes:
    """The first message of a rank's stream."""
    incarnation = f"{random.randbytes(6).hex()}-{rank}"
    process = session_pb2.Process(rank=rank, incarnation=incarnation, host="hostile", pid=1)
    said = session_pb2.Hello(run_id=run_id, generation=generation, processes=[process], protocol_version=1)
    return session_pb2.ConnectRequest(hello=said).SerializeToString()


async def begin_session(attacker: Attacker, channel: grpc.aio.Channel, token: str, first: bytes) -> None:
    """Open a stream, say one message, and count how it is answered."""
    stream = attacker.session(channel, token)
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        await stream.write(first)
        while (data := await stream.read()) is not grpc.aio.EOF:
            message = session_pb2.ConnectResponse.FromString(data)
            if message.HasField("welcome"):
                attacker.answered("welcome")
                stream.cancel()
                return
    attacker.answered(await status_of(stream))


async def gzip_bombs(attacker: Attacker) -> None:
    """Row 9: 8 requests of 16 KiB to the open health method, each of which becomes 16 MiB."""
    bomb = bytes(MESSAGE)
    channels = [attacker.channel() for _ in range(2)]

    async def send(number: int) -> None:
        await attacker.call(channels[number % 2], CHECK, bomb, compression=grpc.Compression.Gzip)

    await together(8, send)
    await _close(*channels)


async def gzip_bombs_with_token(attacker: Attacker) -> None:
    """Row 9: compressed messages on a worker's stream."""
    channel = attacker.channel()
    bomb = bytes(MESSAGE)

    async def send(_: int) -> None:
        made: Any = channel.unary_unary(CONNECT)
        try:
            await made(
                bomb,
                metadata=(("authorization", f"Bearer {attacker.target.stranger}"),),
                compression=grpc.Compression.Gzip,
            )
        except grpc.aio.AioRpcError as error:
            attacker.answered(error.code().name)

    await together(8, send)
    await channel.close()


async def large_open_requests(attacker: Attacker) -> None:
    """Row 9: requests of 16 MiB to the open health method, not compressed."""
    data = bytes(MESSAGE)
    channels = [attacker.channel() for _ in range(4)]

    async def send(number: int) -> None:
        await attacker.call(channels[number % 4], CHECK, data)

    await together(16, send)
    await _close(*channels)


async def broken_messages(attacker: Attacker) -> None:
    """Row 9: bytes that are no message, with a token."""
    channel = attacker.channel()
    token = attacker.target.stranger

    async def send(number: int) -> None:
        broken = b"\xff" + random.randbytes(1 + 100 * number)
        await attacker.call(channel, ARRIVE, broken, token=token)
        await attacker.call(channel, SET, broken, token=token)
        await begin_session(attacker, channel, token, broken)

    await together(10, send)
    await channel.close()


async def oversized_messages(attacker: Attacker) -> None:
    """Row 9: messages beyond each bound, with a token: of a payload, of a value, of any message."""
    channel = attacker.channel()
    token = attacker.target.stranger
    arrive = barrier_pb2.ArriveRequest(
        run_id=OWN_RUN, prefix="large", world_size=1, timeout_ms=1_000, payload=bytes(5 * LARGE)
    )
    await attacker.call(channel, ARRIVE, arrive, token=token)
    large = store_pb2.KeyValue(key="large", value=bytes(5 * LARGE))
    await attacker.call(channel, SET, store_pb2.SetRequest(run_id=OWN_RUN, entries=[large]), token=token)
    larger = store_pb2.KeyValue(key="large", value=bytes(2 * MESSAGE))
    await attacker.call(channel, SET, store_pb2.SetRequest(run_id=OWN_RUN, entries=[larger]), token=token)
    await begin_session(attacker, channel, token, bytes(2 * MESSAGE))
    await channel.close()


async def unknown_tokens(attacker: Attacker) -> None:
    """Row 17: calls without a token, and with tokens that nobody has given out."""
    channel = attacker.channel()

    async def send(number: int) -> None:
        for token in ("", *MADE_UP):
            request = store_pb2.NumKeysRequest(run_id=TEAM_RUN)
            await attacker.call(channel, "/muster.v1.StoreService/NumKeys", request, token=token)
        await begin_session(attacker, channel, MADE_UP[number % len(MADE_UP)], hello(TEAM_RUN))

    await together(10, send)
    await channel.close()


async def other_runs(attacker: Attacker) -> None:
    """Row 17: a worker's token that speaks for another run: of its ranks, its barriers, its store."""
    channel = attacker.channel()
    token = attacker.target.stranger
    arrive = barrier_pb2.ArriveRequest(
        run_id=TEAM_RUN, prefix="checkpoint", rank=1, world_size=8, failure="no reason", timeout_ms=1_000
    )
    calls: dict[str, Any] = {
        ARRIVE: arrive,
        "/muster.v1.BarrierService/Abort": barrier_pb2.AbortRequest(run_id=TEAM_RUN, prefix="checkpoint"),
        "/muster.v1.RendezvousService/Close": rendezvous_pb2.CloseRequest(run_id=TEAM_RUN),
        "/muster.v1.RendezvousService/Leave": rendezvous_pb2.LeaveRequest(run_id=TEAM_RUN, incarnation="n"),
        "/muster.v1.RunService/RequestSave": run_pb2.RequestSaveRequest(run_id=TEAM_RUN, stop=True),
        SET: store_pb2.SetRequest(run_id=TEAM_RUN, entries=[store_pb2.KeyValue(key="k", value=b"v")]),
        "/muster.v1.StoreService/DeletePrefix": store_pb2.DeletePrefixRequest(run_id=TEAM_RUN),
    }
    for method, request in calls.items():
        await attacker.call(channel, method, request, token=token)
    await begin_session(attacker, channel, token, hello(TEAM_RUN, rank=1, generation=2))
    await channel.close()


async def higher_roles(attacker: Attacker) -> None:
    """Row 17: a viewer that does a worker's work, and a worker that does an operator's."""
    channel = attacker.channel()
    spy, stranger = attacker.target.spy, attacker.target.stranger
    abort = barrier_pb2.AbortRequest(run_id=TEAM_RUN, prefix="checkpoint")
    await attacker.call(channel, "/muster.v1.BarrierService/Abort", abort, token=spy)
    close = rendezvous_pb2.CloseRequest(run_id=TEAM_RUN)
    await attacker.call(channel, "/muster.v1.RendezvousService/Close", close, token=spy)
    await begin_session(attacker, channel, spy, hello(TEAM_RUN, rank=1, generation=2))
    for run_id in (OWN_RUN, TEAM_RUN):
        evict = run_pb2.EvictRequest(run_id=run_id, rank=0)
        await attacker.call(channel, "/muster.v1.RunService/Evict", evict, token=stranger)
        forget = run_pb2.ForgetRequest(run_id=run_id, force=True)
        await attacker.call(channel, "/muster.v1.RunService/Forget", forget, token=stranger)
        stacks = insight_pb2.StacksRequest(run_id=run_id)
        await attacker.call(channel, "/muster.v1.InsightService/Stacks", stacks, token=stranger)
    await channel.close()


async def older_processes(attacker: Attacker) -> None:
    """Invariant 11 (the newer fences the older): an older generation's processes, with the job's token."""
    channel = attacker.channel()
    token = attacker.target.member

    async def come_back(rank: int) -> None:
        await begin_session(attacker, channel, token, hello(TEAM_RUN, rank=rank, generation=0))
        arrive = barrier_pb2.ArriveRequest(
            run_id=TEAM_RUN, prefix="checkpoint", rank=rank, world_size=8, timeout_ms=1_000
        )
        await attacker.call(channel, ARRIVE, arrive, token=token)

    await together(8, come_back)
    await channel.close()


async def full_store(attacker: Attacker) -> None:
    """Row 11: values of 1 MiB until the run's store takes no more."""
    channel = attacker.channel()
    token = attacker.target.stranger
    for number in range(70):
        if attacker.answers["LIMIT_EXCEEDED max_store_bytes"]:
            break
        entry = store_pb2.KeyValue(key=f"full/{number}", value=bytes(LARGE))
        await attacker.call(
            channel, SET, store_pb2.SetRequest(run_id=f"{OWN_RUN}.full", entries=[entry]), token=token
        )
    entry = store_pb2.KeyValue(key="one more", value=bytes(LARGE))
    await attacker.call(
        channel, SET, store_pb2.SetRequest(run_id=f"{OWN_RUN}.full", entries=[entry]), token=token
    )
    await channel.close()


async def message_flood(attacker: Attacker) -> None:
    """Row 16: streams that arrive at barriers of their own as fast as they are let."""
    channel = attacker.channel()
    streams = [attacker.session(channel, attacker.target.stranger) for _ in range(4)]

    async def flood(number: int) -> None:
        stream = streams[number]
        run_id = f"{OWN_RUN}.flood-{number}"
        await stream.write(hello(run_id))
        join = session_pb2.JoinGroup(prefix="p", world_size=1)
        await stream.write(session_pb2.ConnectRequest(join_group=join).SerializeToString())
        sequence = -1

        async def hear() -> None:
            nonlocal sequence
            while (data := await stream.read()) is not grpc.aio.EOF:
                message = session_pb2.ConnectResponse.FromString(data)
                if message.HasField("group_joined"):
                    sequence = message.group_joined.positions[0].sequence
                    joined.set()
                if message.HasField("decision"):
                    attacker.answered("RELEASED")

        joined = asyncio.Event()
        hearing = asyncio.create_task(hear())
        await joined.wait()
        for said in range(500):
            arrival = session_pb2.Arrival(rank=0, payload=bytes(100))
            arrive = session_pb2.Arrive(
                prefix="p", sequence=sequence + said, timeout_ms=60_000, arrivals=[arrival]
            )
            await stream.write(session_pb2.ConnectRequest(arrive=arrive).SerializeToString())
        await stream.done_writing()
        await asyncio.sleep(1)
        stream.cancel()
        hearing.cancel()

    await together(len(streams), flood)
    await channel.close()


async def _close(*channels: grpc.aio.Channel) -> None:
    await asyncio.gather(*(channel.close() for channel in channels))
