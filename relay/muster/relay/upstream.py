"""The connection to the leading coordinator, for all upstream streams and all calls of a relay.

A stream that breaks is not opened again: its processes reconnect and get another one. So the relay has
nothing to remember.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import grpc

from muster.client.calls import call_headers, explain, open_aio_channel, reason_of, search_on
from muster.client.credentials import Credentials
from muster.client.errors import EnvironmentValueError
from muster.client.protocol import AGENT_RELAY_HEADER, PROTOCOL_VERSION, RELAY_HEADER, TTL_PINGS
from muster.client.replicas import Replicas, Search, Target
from muster.relay import refusals
from muster.relay.stats import RelayStats
from muster.relay.upstream_stream import FOLD_WINDOW, UpstreamStream
from muster.serving.outbox import Outbox
from muster.v1 import session_pb2 as pb

logger = logging.getLogger(__name__)

CONNECT = "/muster.v1.SessionService/Connect"
MAX_SEARCH_TIME = 3.0
"""Seconds that a caller waits while the relay searches for the coordinator. Then it should connect without
the relay, well within the session TTL."""
TAKEOVER_TIME = 1.5
"""Seconds from the end of a lease until the next leader has answered."""
RECONNECT_MS = 500
"""Milliseconds between two attempts to connect. gRPC's own pause grows up to two minutes, and waiting calls
share the connection: they would not see that the coordinator is back."""
GOODBYE_TIMEOUT = 2.0
"""Seconds that the coordinator has to end a stream after its goodbye."""


class Upstream:
    """The connection to the coordinator.

    Args:
        endpoint: of the coordinator, its replicas, or another relay.
        name: of this relay, for people: its host and process id.
        version: of this relay.
        stats: what is measured.
        fold_window: as :class:`~muster.relay.upstream_stream.UpstreamStream`.
        in_agent: whether the relay runs in the process of the node's agent.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        name: str,
        version: str,
        stats: RelayStats,
        fold_window: float = FOLD_WINDOW,
        in_agent: bool = False,
    ) -> None:
        self.replicas = Replicas(endpoint)
        self._name = name
        own: list[tuple[str, str | bytes]] = [(RELAY_HEADER, name.encode())]
        self._own_headers = [*own, (AGENT_RELAY_HEADER, "true")] if in_agent else own
        self._version = version
        self._stats = stats
        self._fold_window = fold_window
        self._channels: dict[Target, grpc.aio.Channel] = {}
        self._latest: Target | None = None
        """The target of the latest call: its connection stays open without users."""
        self._users: dict[Target, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.search_time = MAX_SEARCH_TIME
        """As ``MAX_SEARCH_TIME``; less with a short session TTL, more if another may lead soon."""

    def addresses(self) -> list[str]:
        """Return the known addresses of the coordinators."""
        return self.replicas.known()

    def cut_off(self, why: str) -> None:
        """Note that the relay did not reach the coordinator in time; logged once until it answers again.

        Args:
            why: for people.
        """
        if self._stats.connected or not self._stats.cut_offs:
            logger.warning(
                "this relay does not reach the coordinator (%s); callers that can connect without it",
                why.rstrip("."),
            )
        self._stats.cut_off()

    # ------------------------------------------------------------------ streams

    def open_stream(
        self, run_id: str, generation: int, on_closed: Callable[[UpstreamStream], None]
    ) -> UpstreamStream:
        """Make a stream, and start to connect it.

        Args:
            run_id: the run of all its processes.
            generation: their generation.
            on_closed: is called once, when the stream accepts no more processes.
        """
        loop = asyncio.get_running_loop()
        task: asyncio.Task[None]

        def close(stream: UpstreamStream) -> None:
            on_closed(stream)
            if stream.ended:
                stream.outbox.close()
                task.cancel()
            else:
                loop.call_later(GOODBYE_TIMEOUT, task.cancel)

        stream = UpstreamStream(
            run_id,
            generation,
            outbox=Outbox(),
            call_later=loop.call_later,
            on_closed=close,
            stats=self._stats,
            fold_window=self._fold_window,
        )
        task = loop.create_task(self._run_stream(stream), name=f"muster-relay-stream-{run_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def _run_stream(self, stream: UpstreamStream) -> None:
        """Find the coordinator, and carry the stream until its connection ends."""
        self._stats.upstream_streams += 1
        search = Search(self.replicas)
        try:
            why = await self._serve_stream(stream, search)
            if stream.welcome is None:
                if not stream.ended:
                    self.cut_off(why)
                stream.end(refusals.cut_off(why))
            else:
                self._stats.reconnects += not stream.closed
                stream.end(refusals.upstream_lost(why))
        finally:
            self._stats.upstream_streams -= 1
            stream.outbox.close()
            # Also after a cancellation: callers must not wait for a stream that is gone.
            stream.end(refusals.upstream_lost("its stream was ended"))

    async def _serve_stream(self, stream: UpstreamStream, search: Search) -> str:
        """Return why the stream ended, or why none could be opened in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.search_time) as limit:
                while True:
                    try:
                        pause = await self._converse(stream, search, limit)
                        if stream.welcome is not None:
                            return "it ended the stream"
                    except grpc.aio.AioRpcError as error:
                        # A look-up of a name may take long, and must not stop the loop.
                        pause = await asyncio.to_thread(search_on, search, error)
                        if stream.welcome is not None:
                            return explain(error)
                    except EnvironmentValueError as error:
                        pause = search.again(str(error))
                    if stream.ended:
                        return "it was refused"
                    await asyncio.sleep(pause)
        return search.said

    async def _converse(self, stream: UpstreamStream, search: Search, limit: asyncio.Timeout) -> float:
        """Open a connection and read it to its end. Return a pause if there was no Welcome."""
        target = search.begin()
        async with self.channel(target) as channel:
            call: Any = channel.stream_stream(CONNECT)(metadata=await self.metadata(search, target))
            try:
                await call.write(self._hello(stream))
                data = await call.read()
                if data is grpc.aio.EOF:
                    return search.again("it ended the stream before it answered")
                first = pb.ConnectResponse.FromString(data)
                if first.HasField("refusal"):
                    if _knows_no_relays(first.refusal):
                        why = f"its version does not support relays: {first.refusal.message}"
                        self.cut_off(why)
                        stream.end(refusals.cut_off(why))
                    else:
                        self._stats.connected = True
                        stream.end(first.refusal, announce=True)
                    return search.again(first.refusal.message)
                if self._must_ping_faster(first.welcome, target):
                    return 0.0
                search.answered()
                limit.reschedule(None)
                self._stats.connected = True
                stream.receive(data)
                await self._forward_both_ways(call, stream)
                return 0.0
            finally:
                call.cancel()

    async def _forward_both_ways(self, call: Any, stream: UpstreamStream) -> None:
        writer = asyncio.create_task(stream.outbox.write(lambda _, take: call.write(take())))
        try:
            while (data := await call.read()) is not grpc.aio.EOF:
                stream.receive(data)
        finally:
            writer.cancel()
            with suppress(asyncio.CancelledError, grpc.RpcError, asyncio.InvalidStateError):
                await writer

    def _hello(self, stream: UpstreamStream) -> bytes:
        hello = pb.Hello(
            run_id=stream.run_id,
            generation=stream.generation,
            sdk_version=self._version,
            protocol_version=PROTOCOL_VERSION,
            relay=self._name,
        )
        return pb.ConnectRequest(hello=hello).SerializeToString()

    def _must_ping_faster(self, welcome: pb.Welcome, target: Target) -> bool:
        """Return whether this connection would notice its loss too late, and must be replaced."""
        keepalive_ms = welcome.keepalive_ms or welcome.session_ttl_ms // TTL_PINGS
        self.replicas.learn(welcome.replicas, keepalive_ms)
        lease_ttl_ms = welcome.keepalive_ms * TTL_PINGS if len(welcome.replicas) > 1 else 0
        self.search_time = search_time(welcome.session_ttl_ms, lease_ttl_ms)
        return keepalive_ms < target.keepalive_ms

    # ------------------------------------------------------------------ channels

    @asynccontextmanager
    async def channel(self, target: Target) -> AsyncIterator[grpc.aio.Channel]:
        """Return the connection to a coordinator, shared by all its users.

        It is closed when it has no users and another one has been opened.

        Raises:
            EnvironmentValueError: the token or a certificate cannot be used.
        """
        # Targets that differ in the connect timeout alone share a connection.
        key = replace(target, connect_timeout_ms=0)
        if key not in self._channels:
            self._channels[key] = _open(target)
        self._latest = key
        self._users[key] = self._users.get(key, 0) + 1
        try:
            yield self._channels[key]
        except grpc.aio.AioRpcError as error:
            # The next connection may use new certificates. This one stays open while others use it.
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
        """Return the headers of a call: the relay's own token and name, and none of its caller's.

        Raises:
            EnvironmentValueError: the token cannot be used.
        """
        headers = await call_headers(search, Credentials.toward(target.address))
        return [*headers, *self._own_headers]

    async def close(self) -> None:
        """End all streams and connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for key in list(self._channels):
            await self._close(key)


def search_time(session_ttl_ms: int, lease_ttl_ms: int = 0) -> float:
    """Return how long callers wait at the relay that must be back within the session TTL.

    This side notices within two thirds of the TTL that a stream is silent. The coordinator starts to count
    when it notices that itself. If the relay uses a third for the search, enough time is left to connect
    without the relay.

    Among several coordinators, the leader is probably lost. No coordinator leads before its lease ends, and
    callers that connected directly would stay there, each with its own stream. Here this side notices the
    loss first, by the lease's shorter keepalive, so the search may take two thirds.

    Args:
        session_ttl_ms: milliseconds.
        lease_ttl_ms: milliseconds; 0: there is only one coordinator.

    Returns:
        Seconds.
    """
    if lease_ttl_ms:
        return min(lease_ttl_ms / 1000 + TAKEOVER_TIME, session_ttl_ms / 1500)
    return min(MAX_SEARCH_TIME, session_ttl_ms / 3000)


def _open(target: Target) -> grpc.aio.Channel:
    backoffs = ("grpc.initial_reconnect_backoff_ms", "grpc.max_reconnect_backoff_ms")
    options = [(name, RECONNECT_MS) for name in backoffs]
    return open_aio_channel(target, Credentials.toward(target.address), options)


def _knows_no_relays(refusal: pb.Refusal) -> bool:
    """Return whether a coordinator before 0.2 refused a relay's Hello because it names no processes."""
    info = refusals.info_of(refusal)
    given = info.metadata.get("field")
    return bool(info.reason == "INVALID_ARGUMENT" and given == "processes")
