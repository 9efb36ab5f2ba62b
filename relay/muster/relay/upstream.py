"""The way up: one connection to the coordinator that leads, for all lines and all calls.

A stream that breaks is not opened again: its line is over, and whoever spoke on it comes back and finds
another. So nothing has to be remembered here.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc

from muster.client.addresses import target_of
from muster.client.calls import (
    PROTOCOL_VERSION,
    RELAY_HEADER,
    channel_options,
    explain,
    reason_of,
    search_on,
)
from muster.client.credentials import Credentials
from muster.client.errors import EnvironmentValueError
from muster.client.replicas import Replicas, Search, Target
from muster.relay import refusals
from muster.relay.counts import Counts
from muster.relay.line import PATIENCE, Line
from muster.relay.streams import MAX_UNSENT, Outbox
from muster.v1 import session_pb2 as pb

logger = logging.getLogger(__name__)

CONNECT = "/muster.v1.SessionService/Connect"
HOLD = 3.0
"""Seconds for which who asks for the coordinator is kept waiting while it is searched for. After that who can
reach it without the relay should: well within the session TTL."""
KEEPALIVES = 3
"""Among several coordinators, so many of the keepalives that they ask for are the lease TTL."""
TAKING_OVER = 1.5
"""Seconds from a lease's end until the next leader has answered."""
RECONNECT = 500
"""Milliseconds between two attempts to connect. gRPC's own pause grows up to two minutes, and calls that are
held meanwhile share the connection: they would not see that the coordinator is back."""
GOODBYE_TIMEOUT = 2.0
"""Seconds that the coordinator has to end a stream on which nobody speaks any more."""


class Upstream:
    """The connection to the coordinator.

    Args:
        endpoint: of the coordinator, its replicas, or another relay.
        name: of this relay, for people: its host and process id.
        version: of this relay.
        counts: what is measured.
        patience: as :class:`~muster.relay.line.Line`.
    """

    def __init__(
        self, endpoint: str, *, name: str, version: str, counts: Counts, patience: float = PATIENCE
    ) -> None:
        self.replicas = Replicas(endpoint)
        self._name = name
        self._version = version
        self._counts = counts
        self._patience = patience
        self._channels: dict[Target, grpc.aio.Channel] = {}
        self._latest: Target | None = None
        """Whose connection was asked for last: it stays open when nobody uses it."""
        self._users: dict[Target, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._outboxes: dict[Line, Outbox] = {}
        """Of the lines that are not over."""
        self.hold = HOLD
        """As ``HOLD``; less where the session TTL is short, more where another may lead soon."""

    def addresses(self) -> list[str]:
        """Of the coordinators, as far as they are known."""
        return self.replicas.known()

    def cut_off(self, why: str) -> None:
        """Somebody wanted the coordinator, and it was not reached in time: logged until it answers again.

        Args:
            why: for people.
        """
        if self._counts.connected or not self._counts.cut_offs:
            logger.warning(
                "this relay does not reach the coordinator (%s); who can connects without it", why.rstrip(".")
            )
        self._counts.cut_off()

    # ------------------------------------------------------------------ lines

    def open_line(self, run_id: str, generation: int, over: Callable[[Line], None]) -> Line:
        """Make a line, and begin to connect it.

        Args:
            run_id: the run of all who speak on it.
            generation: theirs.
            over: is called once, when nobody may come to it any more.
        """
        loop = asyncio.get_running_loop()
        outbox = Outbox()
        task: asyncio.Task[None]

        def is_over(line: Line) -> None:
            over(line)
            del self._outboxes[line]
            if line.ended:
                outbox.close()
                task.cancel()
            else:
                loop.call_later(GOODBYE_TIMEOUT, task.cancel)

        line = Line(
            run_id,
            generation,
            say=lambda request: outbox.put(request.SerializeToString()),
            after=loop.call_later,
            over=is_over,
            counts=self._counts,
            patience=self._patience,
        )
        self._outboxes[line] = outbox
        task = loop.create_task(self._carry(line, outbox), name=f"muster-relay-line-{run_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return line

    async def room(self, lines: Iterable[Line]) -> None:
        """Wait while the coordinator does not take what is said on one of these lines."""
        for line in lines:
            if (outbox := self._outboxes.get(line)) is not None:
                await outbox.room(MAX_UNSENT)

    async def _carry(self, line: Line, outbox: Outbox) -> None:
        """Find the coordinator, and be its stream for as long as it lasts."""
        self._counts.lines += 1
        search = Search(self.replicas)
        try:
            why = await self._find(line, outbox, search)
            if line.welcome is None:
                if not line.ended:
                    self.cut_off(why)
                line.end(refusals.cut_off(why))
            else:
                self._counts.reconnects += not line.deserted
                line.end(refusals.upstream_lost(why))
        finally:
            self._counts.lines -= 1
            outbox.close()
            # By a cancellation, too: whoever speaks here must not wait for what does not come.
            line.end(refusals.upstream_lost("its stream was ended"))

    async def _find(self, line: Line, outbox: Outbox, search: Search) -> str:
        """Returns why the stream ended, or that none could be opened in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.hold) as hold:
                while True:
                    try:
                        pause = await self._converse(line, outbox, search, hold)
                        if line.welcome is not None:
                            return "it ended the stream"
                    except grpc.aio.AioRpcError as error:
                        # Looking a name up may take long, and the loop is everyone's.
                        pause = await asyncio.to_thread(search_on, search, error)
                        if line.welcome is not None:
                            return explain(error)
                    except EnvironmentValueError as error:
                        pause = search.again(str(error))
                    if line.ended:
                        return "it was refused"
                    await asyncio.sleep(pause)
        return search.said

    async def _converse(self, line: Line, outbox: Outbox, search: Search, hold: asyncio.Timeout) -> float:
        """Open a stream and read it to its end. Returns a pause, if it was not welcomed."""
        target = search.begin()
        async with self.channel(target) as channel:
            call: Any = channel.stream_stream(CONNECT)(metadata=await self.metadata(search, target))
            try:
                await call.write(self._hello(line))
                data = await call.read()
                if data is grpc.aio.EOF:
                    return search.again("it ended the stream before it answered")
                first = pb.ConnectResponse.FromString(data)
                if first.HasField("refusal"):
                    if _knows_no_relays(first.refusal):
                        why = f"it is of a version that knows no relays: {first.refusal.message}"
                        self.cut_off(why)
                        line.end(refusals.cut_off(why))
                    else:
                        self._counts.connected = True
                        line.end(first.refusal, tell=True)
                    return search.again(first.refusal.message)
                if self._must_ping_faster(first.welcome, target):
                    return 0.0
                search.answered()
                hold.reschedule(None)
                self._counts.connected = True
                line.hear(data)
                await self._carry_both_ways(call, line, outbox)
                return 0.0
            finally:
                call.cancel()

    async def _carry_both_ways(self, call: Any, line: Line, outbox: Outbox) -> None:
        writer = asyncio.create_task(outbox.write(lambda _, take: call.write(take())))
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                line.hear(data)
        finally:
            writer.cancel()
            with suppress(asyncio.CancelledError, grpc.RpcError, asyncio.InvalidStateError):
                await writer

    def _hello(self, line: Line) -> bytes:
        hello = pb.Hello(
            run_id=line.run_id,
            generation=line.generation,
            sdk_version=self._version,
            protocol_version=PROTOCOL_VERSION,
            relay=self._name,
        )
        return pb.ConnectRequest(hello=hello).SerializeToString()

    def _must_ping_faster(self, welcome: pb.Welcome, target: Target) -> bool:
        """Whether this connection would notice too late that it is lost, and must be replaced."""
        keepalive_ms = welcome.keepalive_ms or welcome.session_ttl_ms // 3
        self.replicas.learn(welcome.replicas, keepalive_ms)
        lease_ttl_ms = welcome.keepalive_ms * KEEPALIVES if len(welcome.replicas) > 1 else 0
        self.hold = hold_within(welcome.session_ttl_ms, lease_ttl_ms)
        return keepalive_ms < target.keepalive_ms

    # ------------------------------------------------------------------ channels

    @asynccontextmanager
    async def channel(self, target: Target) -> AsyncIterator[grpc.aio.Channel]:
        """The connection to a coordinator, shared by all who use it.

        It is closed when nobody uses it and another one has been asked for.

        Raises:
            EnvironmentValueError: the token or a certificate cannot be used.
        """
        # For how long an attempt to connect may take is no matter of whose connection it is.
        key = replace(target, connect_timeout_ms=0)
        if key not in self._channels:
            self._channels[key] = _open(target)
        self._latest = key
        self._users[key] = self._users.get(key, 0) + 1
        try:
            yield self._channels[key]
        except grpc.aio.AioRpcError as error:
            # Another may need other certificates; this one is not closed while others use it.
            silent = error.code() is grpc.StatusCode.UNAVAILABLE and not reason_of(error)
            if silent and self._users[key] == 1:
                await self._close(key)
            raise
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
            for one in list(self._channels):
                if one not in (self._latest, *self._users):
                    await self._close(one)

    async def _close(self, key: Target) -> None:
        channel = self._channels.pop(key, None)
        if channel is not None:
            await channel.close()

    async def metadata(self, search: Search, target: Target) -> list[tuple[str, str | bytes]]:
        """Return the headers of a call: the relay's own token and name, and nothing of its caller.

        Raises:
            EnvironmentValueError: the token cannot be used.
        """
        credentials = Credentials.toward(target.address)
        if credentials.token_command:
            authorization = await asyncio.to_thread(credentials.authorization)
        else:
            authorization = credentials.authorization()
        token = [("authorization", authorization)] if authorization else []
        return [*search.metadata, *token, (RELAY_HEADER, self._name.encode())]

    async def close(self) -> None:
        """End all streams and connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for key in list(self._channels):
            await self._close(key)


def hold_within(session_ttl_ms: int, lease_ttl_ms: int = 0) -> float:
    """How long to keep those waiting who must be back within the session TTL.

    A stream that falls silent is missed on both sides within two thirds of it, and then the coordinator
    begins to count: a third that is spent here leaves time for the way without the relay.

    Among several coordinators the leader is likely to be lost. Nobody can go on before its lease is over and
    another one leads, and who went elsewhere meanwhile would stay there, with a stream of its own. There
    this side misses it first, by the lease's shorter keepalive, so two thirds may be spent.

    Args:
        session_ttl_ms: milliseconds.
        lease_ttl_ms: milliseconds; 0: there is but one coordinator.

    Returns:
        Seconds.
    """
    if lease_ttl_ms:
        return min(lease_ttl_ms / 1000 + TAKING_OVER, session_ttl_ms / 1500)
    return min(HOLD, session_ttl_ms / 3000)


def _open(target: Target) -> grpc.aio.Channel:
    credentials = Credentials.toward(target.address)
    address = target_of(target.address)
    options = [
        *channel_options(target),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT),
        ("grpc.max_reconnect_backoff_ms", RECONNECT),
    ]
    tls = credentials.channel_credentials()
    if tls is None:
        credentials.warn_if_readable(target.address)
        return grpc.aio.insecure_channel(address, options=options)
    named = [*options, *credentials.name_options(target.tls_name)]
    return grpc.aio.secure_channel(address, tls, options=named)


def _knows_no_relays(refusal: pb.Refusal) -> bool:
    """Whether a coordinator before 0.2 has missed the processes in a relay's Hello."""
    info = refusals.info_of(refusal)
    given = info.metadata.get("field")
    return bool(info.reason == "INVALID_ARGUMENT" and given == "processes")
