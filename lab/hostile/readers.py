"""Attacks by clients that ask for much and read little: their answers wait in the coordinator's memory."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from grpc_health.v1 import health_pb2

from lab.hostile.attacker import LARGE, OWN_RUN, Attacker, together
from lab.hostile.requests import ARRIVE, SET, hello
from muster.v1 import barrier_pb2, run_pb2, session_pb2, store_pb2

HELD = 6.0
"""Seconds that an answer is left unread; then its reader goes away."""
GATHERED = 4
"""Ranks whose payloads of 1 MiB are gathered: as much as one barrier takes by default."""


async def unread_gathers(attacker: Attacker) -> None:
    """Row 11: 40 barriers that gather 4 MiB each, on streams that are not read."""
    channel = attacker.channel()
    started = time.monotonic_ns()

    async def arrive(rank: int) -> None:
        stream = attacker.session(channel, attacker.target.stranger)

        async def say() -> None:
            await stream.write(hello(f"{OWN_RUN}.gathers-{started}", rank=rank))
            join = session_pb2.JoinGroup(prefix="p", world_size=GATHERED)
            await stream.write(session_pb2.ConnectRequest(join_group=join).SerializeToString())
            for sequence in range(40):
                arrival = session_pb2.Arrival(rank=rank, payload=bytes(LARGE))
                arrive = session_pb2.Arrive(
                    prefix="p", sequence=sequence, timeout_ms=60_000, arrivals=[arrival]
                )
                await stream.write(session_pb2.ConnectRequest(arrive=arrive).SerializeToString())

        await _talk_and_listen_late(attacker, stream, say)

    await together(GATHERED, arrive)
    await channel.close()


async def _talk_and_listen_late(attacker: Attacker, stream: Any, talk: Callable[[], Awaitable[None]]) -> None:
    """Say all before anything is read: only so it is heard at last why the stream was cut off."""
    talking = asyncio.ensure_future(together(1, lambda _: talk()))
    # Not by a timeout: gRPC ends a call whose write is cancelled.
    await asyncio.wait([talking], timeout=HELD)
    if not talking.done():
        attacker.answered("held back")
    listening = asyncio.ensure_future(attacker.read_end(stream))
    await asyncio.wait([listening], timeout=HELD)
    if not listening.done():
        attacker.answered("served")
    stream.cancel()
    for task in (talking, listening):
        task.cancel()
    await asyncio.gather(talking, listening, return_exceptions=True)


async def unread_decisions(attacker: Attacker) -> None:
    """Row 11: the outcome of one barrier that gathered 4 MiB, asked for 64 times and not read."""
    channel = attacker.channel()
    token = attacker.target.stranger
    run_id = f"{OWN_RUN}.decisions"

    def arrival(rank: int, payload: bytes) -> barrier_pb2.ArriveRequest:
        return barrier_pb2.ArriveRequest(
            run_id=run_id,
            prefix="p",
            rank=rank,
            world_size=GATHERED,
            sequence=0,
            timeout_ms=60_000,
            payload=payload,
            incarnation=f"r{rank}",
        )

    async def arrive(rank: int) -> None:
        await attacker.call(channel, ARRIVE, arrival(rank, bytes(LARGE)), token=token)

    await together(GATHERED, arrive)

    async def ask(number: int) -> None:
        call = attacker.call_unread(channel, ARRIVE, arrival(number % GATHERED, b""), token)
        await attacker.until_ended(call, HELD)

    await together(64, ask)
    await channel.close()


async def unread_values(attacker: Attacker) -> None:
    """Row 11: 64 calls for 8 MiB of a store each, none of them read. Most are held: they wait for a place."""
    channels = [attacker.channel() for _ in range(4)]
    token = attacker.target.stranger
    run_id = f"{OWN_RUN}.values"
    keys = [f"large/{number}" for number in range(8)]
    for key in keys:
        entry = store_pb2.KeyValue(key=key, value=bytes(LARGE))
        request = store_pb2.SetRequest(run_id=run_id, entries=[entry])
        await attacker.call(channels[0], SET, request, token=token)

    async def get(number: int) -> None:
        request = store_pb2.StoreServiceGetRequest(run_id=run_id, keys=keys, timeout_ms=1_000)
        call = attacker.call_unread(channels[number % 4], "/muster.v1.StoreService/Get", request, token)
        await attacker.until_ended(call, HELD)

    await together(64, get)
    await asyncio.gather(*(channel.close() for channel in channels))


async def unread_dialogues(attacker: Attacker) -> None:
    """Row 11: 32 streams of a store that ask for 100 MiB each before they take an answer.

    They are not refused: their own unread answers hold them up, and what they use is in the memory's figure.
    """
    channel = attacker.channel()
    run_id = f"{OWN_RUN}.dialogues"

    async def talk(number: int) -> None:
        made: Any = channel.stream_stream(
            "/muster.v1.StoreService/Operate",
            request_serializer=store_pb2.OperateRequest.SerializeToString,
        )
        stream = made(metadata=(("authorization", f"Bearer {attacker.target.stranger}"),))
        entry = store_pb2.KeyValue(key=f"{number}", value=bytes(LARGE))
        operation = store_pb2.OperationId(client=f"hostile-{number}-{time.monotonic()}", number=1)
        wrote = store_pb2.OperateRequest(
            set=store_pb2.SetRequest(run_id=run_id, entries=[entry], operation=operation)
        )
        read = store_pb2.OperateRequest(
            get=store_pb2.StoreServiceGetRequest(run_id=run_id, keys=[entry.key], timeout_ms=1_000)
        )

        async def say() -> None:
            await stream.write(wrote)
            for _ in range(100):
                await stream.write(read)

        await _talk_and_listen_late(attacker, stream, say)

    await together(32, talk)
    await channel.close()


async def watches(attacker: Attacker) -> None:
    """Row 12: 600 watches of runs with a viewer's token, of which every second is not read."""
    channels = [attacker.channel() for _ in range(6)]
    request = run_pb2.WatchRequest()

    async def watch(number: int) -> None:
        call = attacker.call_unread(
            channels[number % 6], "/muster.v1.RunService/Watch", request, attacker.target.spy
        )
        if number % 2:
            await attacker.until_ended(call, HELD)
            return
        try:
            async with asyncio.timeout(HELD):
                await attacker.read_end(call)
        except TimeoutError:
            attacker.answered("held")

    await together(600, watch)
    await asyncio.gather(*(channel.close() for channel in channels))


async def health_watches(attacker: Attacker) -> None:
    """Row 9: 200 watches of the health, which need no token."""
    channels = [attacker.channel() for _ in range(6)]
    request = health_pb2.HealthCheckRequest()

    async def watch(number: int) -> None:
        call = attacker.call_unread(channels[number % 6], "/grpc.health.v1.Health/Watch", request, "")
        await attacker.until_ended(call, HELD)

    await together(200, watch)
    await asyncio.gather(*(channel.close() for channel in channels))


async def silent_sessions(attacker: Attacker) -> None:
    """Row 13: 200 streams of workers that never say hello."""
    channels = [attacker.channel() for _ in range(4)]

    async def open_stream(number: int) -> None:
        stream = attacker.session(channels[number % 4], attacker.target.stranger)
        await attacker.read_end(stream)

    await together(200, open_stream)
    await asyncio.gather(*(channel.close() for channel in channels))
