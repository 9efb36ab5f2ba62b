"""Attacks by connections, below any call: those that never begin, those that stay, those that come and go."""

import asyncio
import random
import struct

from lab.hostile.attacker import Attacker, together

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
"""Types of frames, of RFC 9113."""
ACKNOWLEDGED = 1
"""The flag of an answer to SETTINGS or PING."""
CLIENT_HELLO = bytes.fromhex("1603010200010001fc0303") + bytes(40)
"""The begin of a TLS handshake of 512 bytes."""
HELD = 20.0
"""Seconds that a connection stays, if the server does not end it."""


def frame(kind: int, flags: int = 0, payload: bytes = b"", stream: int = 0) -> bytes:
    """A frame of HTTP/2; one of stream 0 is about the connection."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


async def _until_closed(
    attacker: Attacker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trickle: bytes = b""
) -> None:
    """Say nothing, or a byte each second, until the server ends the connection."""
    answer = "held"
    try:
        async with asyncio.timeout(HELD):
            while True:
                try:
                    async with asyncio.timeout(1):
                        if not await reader.read(65_536):
                            answer = "closed"
                            return
                except TimeoutError:
                    writer.write(trickle)
    except TimeoutError:
        pass
    except OSError:
        answer = "closed"
    finally:
        writer.transport.abort()
        attacker.answered(answer)


async def silent_connections(attacker: Attacker) -> None:
    """Row 16: 500 TCP connections that say nothing."""

    async def hold(_: int) -> None:
        await _until_closed(attacker, *await attacker.connect())

    await together(500, hold)


async def half_open_tls(attacker: Attacker) -> None:
    """Row 16: 300 handshakes that never complete: TLS, whose hello comes a byte a second."""

    async def hold(_: int) -> None:
        reader, writer = await attacker.connect()
        writer.write(CLIENT_HELLO)
        await _until_closed(attacker, reader, writer, trickle=b"\x00")

    await together(300, hold)


async def half_open_http2(attacker: Attacker) -> None:
    """Row 16: 100 connections that complete TLS, and then never HTTP/2's preface."""

    async def hold(_: int) -> None:
        reader, writer = await attacker.connect_tls(attacker.target.port, "h2")
        writer.write(PREFACE[:10])
        await _until_closed(attacker, reader, writer)

    await together(100, hold)


async def idle_connections(attacker: Attacker) -> None:
    """Row 13: 500 connections without a call, which answer pings and so are alive."""

    async def hold(_: int) -> None:
        reader, writer = await attacker.connect_tls(attacker.target.port, "h2")
        answer = "held"
        try:
            writer.write(PREFACE + frame(SETTINGS))
            async with asyncio.timeout(HELD):
                answer = await answer_pings(reader, writer)
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()
            attacker.answered(answer)

    await together(500, hold)


async def answer_pings(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Keep a connection alive; how it ended."""
    try:
        while True:
            header = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(header[:3]))
            kind, flags = header[3], header[4]
            if kind == GOAWAY:
                return "GOAWAY"
            if kind in (SETTINGS, PING) and not flags & ACKNOWLEDGED:
                writer.write(frame(kind, ACKNOWLEDGED, payload if kind == PING else b""))
    except (OSError, asyncio.IncompleteReadError):
        return "closed"


async def connection_flood(attacker: Attacker) -> None:
    """Row 13: 100 connections that begin HTTP/2 and go away, and as many that break off before TLS."""

    async def come_and_go(number: int) -> None:
        if number % 2:
            _, writer = await attacker.connect()
            writer.write(random.randbytes(number))
            writer.transport.abort()
            attacker.answered("aborted")
            return
        reader, writer = await attacker.connect_tls(attacker.target.port, "h2")
        try:
            writer.write(PREFACE + frame(SETTINGS))
            header = await reader.readexactly(9)
            attacker.answered("SETTINGS" if header[3] == SETTINGS else "closed")
        finally:
            writer.transport.abort()

    await together(200, come_and_go)


async def rebound_pages(attacker: Attacker) -> None:
    """Row 17: requests that pages of other sites make through a browser, by DNS rebinding."""

    async def ask(number: int) -> None:
        port = attacker.target.http_port
        reader, writer = await attacker.connect_tls(port, "http/1.1")
        foreign = "Host: rebound.example" if number % 2 else f"Host: 127.0.0.1:{port}"
        request = f"GET /runs HTTP/1.1\r\n{foreign}\r\nOrigin: https://rebound.example\r\n\r\n"
        try:
            writer.write(request.encode())
            status = await reader.readuntil(b"\r\n")
            attacker.answered(status.split()[1].decode())
        finally:
            writer.transport.abort()

    await together(10, ask)


async def slow_pages(attacker: Attacker) -> None:
    """Row 16: 1,200 requests to the HTTP port whose headers come a byte a second, most without TLS."""
    port = attacker.target.http_port

    async def hold(number: int) -> None:
        if number % 4:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(attacker.source, 0))
        else:
            reader, writer = await attacker.connect_tls(port, "http/1.1")
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        await _until_closed(attacker, reader, writer, trickle=b"x")

    await together(1_200, hold)
