"""One hostile client: where it attacks, with which tokens, from which address, and how it was answered."""

import asyncio
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from lab.patience import PATIENCE
from muster.client.calls import error_info

TEAM_RUN = "team.job"
"""The run of the ranks that must not notice anything."""
OWN_RUN = "stranger.job"
"""A run that the stranger's token is for."""
CONNECT = "/muster.v1.SessionService/Connect"
LARGE = 1 << 20
"""Bytes of one payload or value: as many as a coordinator takes by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is attacked, and what its attackers know."""

    port: int
    """The gRPC port of a coordinator or of a relay, on this machine."""
    http_port: int
    """The coordinator's HTTP port."""
    ca: str
    """The file of the authority of their certificates."""
    stranger: str
    """A worker's token, for other runs than the team's."""
    spy: str
    """A viewer's token, for the team's run."""
    member: str
    """A worker's token, for the team's runs: what an older process of the same job has."""


@dataclass(slots=True)
class Attacker:
    """The hands of one attack: connections to its target, and a count of the answers."""

    target: Target
    proxied: str
    """The address that leads to the target's port from the attacker's own address."""
    source: str
    """The attacker's own address."""
    answers: Counter[str] = field(default_factory=Counter)
    """How it was answered: reasons of refusals, gRPC's codes, status codes of HTTP, ``closed``."""

    def channel(self) -> grpc.aio.Channel:
        """A connection of its own; gRPC reads no more of a stream than its user asks for."""
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", -1),
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", 16_384),
        ]
        credentials = grpc.ssl_channel_credentials(Path(self.target.ca).read_bytes())
        return grpc.aio.secure_channel(self.proxied, credentials, options=options)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A TCP connection to the target's port."""
        return await asyncio.open_connection("127.0.0.1", self.target.port, local_addr=(self.source, 0))

    async def connect_tls(
        self, port: int, protocol: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A TLS connection to a port.

        Args:
            port: of this machine.
            protocol: what is to be spoken: ``h2`` or ``http/1.1``.
        """
        context = ssl.create_default_context(cafile=self.target.ca)
        context.set_alpn_protocols([protocol])
        return await asyncio.open_connection(
            "127.0.0.1", port, local_addr=(self.source, 0), ssl=context, ssl_handshake_timeout=PATIENCE
        )

    def answered(self, answer: str) -> None:
        """Count an answer."""
        self.answers[answer] += 1

    async def call(
        self,
        channel: grpc.aio.Channel,
        method: str,
        request: Message | bytes,
        *,
        token: str = "",
        compression: grpc.Compression | None = None,
    ) -> None:
        """Make a unary call, and count how it was answered."""
        made: Any = channel.unary_unary(method)
        data = request.SerializeToString() if isinstance(request, Message) else request
        try:
            await made(data, metadata=bearing(token), compression=compression, timeout=PATIENCE)
        except grpc.aio.AioRpcError as error:
            self.answered(answer_of(error))
        else:
            self.answered("OK")

    def call_unread(self, channel: grpc.aio.Channel, method: str, request: Message, token: str) -> Any:
        """Make a call whose answer is not read until the returned stream is."""
        made: Any = channel.unary_stream(method)
        return made(request.SerializeToString(), metadata=bearing(token), timeout=PATIENCE)

    def session(self, channel: grpc.aio.Channel, token: str) -> Any:
        """Open a worker's stream."""
        made: Any = channel.stream_stream(CONNECT, request_serializer=lambda message: message)
        return made(metadata=bearing(token))

    async def read_end(self, stream: Any) -> None:
        """Read a stream to its end, and count how it ended."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while await stream.read() is not grpc.aio.EOF:
                pass
        self.answered(await status_of(stream))

    async def until_ended(self, stream: Any, seconds: float) -> None:
        """Wait without reading for the end of a stream for so long, then give it up; count how it ended."""
        try:
            async with asyncio.timeout(seconds):
                answer = await status_of(stream)
        except TimeoutError:
            stream.cancel()
            answer = "held"
        self.answered(answer)


def bearing(token: str) -> tuple[tuple[str, str], ...]:
    """The metadata that shows a token."""
    return (("authorization", f"Bearer {token}"),) if token else ()


def answer_of(error: Any) -> str:
    """The reason of a refusal with the name of its limit; gRPC's code, if the refusal has no reason."""
    info = error_info(error)
    limit = info.metadata.get("limit", "")
    if error.details() == "Internal error from Core":
        return "broken off"  # By the server, in the midst of a write; gRPC's client keeps no status then.
    return f"{info.reason} {limit}".strip() or str(error.code().name)


async def status_of(stream: Any) -> str:
    """Wait until a stream has ended, and say how."""
    code = await stream.code()
    if code is grpc.StatusCode.OK:
        return "OK"
    return answer_of(
        grpc.aio.AioRpcError(
            code, await stream.initial_metadata(), await stream.trailing_metadata(), await stream.details()
        )
    )


async def together(waves: int, act: Callable[[int], Awaitable[None]]) -> None:
    """Do the same several times at once; a connection that breaks ends one of them alone."""

    async def one(number: int) -> None:
        with suppress(OSError, grpc.aio.AioRpcError, asyncio.IncompleteReadError, asyncio.InvalidStateError):
            await act(number)

    await asyncio.gather(*(one(number) for number in range(waves)))
