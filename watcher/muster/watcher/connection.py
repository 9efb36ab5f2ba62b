"""The connection to the leading coordinator, for the few calls of a watcher."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from muster.client.calls import ELSEWHERE, call_headers, open_aio_channel, reason_of, search_on
from muster.client.credentials import TOKEN_REFUSED, Credentials
from muster.client.errors import EnvironmentValueError
from muster.client.replicas import Replicas, Search, Target
from muster.v1 import run_pb2_grpc

Response = TypeVar("Response")

CALL_TIMEOUT = 8.0
"""Seconds for one call, the search for the leader included."""


class CoordinatorError(Exception):
    """A call failed. The message says why, for people.

    Args:
        message: what happened.
        reason: the reason of the coordinator's refusal; empty: the coordinator was not reached.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class Connection:
    """A connection to the coordinator, whichever of its replicas leads.

    Args:
        endpoint: the coordinator, its replicas, or a relay.
        timeout: seconds for one call.
        credentials: of this process, but for sockets, which ask for none; None: those of the environment.
        clock: seconds of a monotonic clock.
    """

    def __init__(
        self,
        endpoint: str,
        timeout: float = CALL_TIMEOUT,
        credentials: Credentials | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replicas = Replicas(endpoint, clock)
        self._credentials = credentials or Credentials.of()
        self._timeout = timeout
        self._clock = clock
        self._shared: dict[str, _SharedChannel] = {}
        """By address."""

    async def call(self, make: Callable[[Any, float, Any], Awaitable[Response]]) -> Response:
        """Make a call that may be repeated.

        Args:
            make: takes the stub of ``RunService``, seconds for this attempt, and metadata; makes the call.

        Raises:
            CoordinatorError: the coordinator refused the call, or did not answer in time.
        """
        deadline = self._clock() + self._timeout
        search = Search(self._replicas)
        while True:
            left = deadline - self._clock()
            if left <= 0:
                raise CoordinatorError(f"the coordinator did not answer: {search.said}")
            target = search.begin()
            try:
                credentials = self._credentials.valid_for(target.address)
                metadata = await call_headers(search, credentials)
                async with self._channel(target, credentials) as channel:
                    response = await make(run_pb2_grpc.RunServiceStub(channel), left, metadata)
            except grpc.aio.AioRpcError as error:
                reason = reason_of(error)
                if reason and reason not in ELSEWHERE | TOKEN_REFUSED:
                    search.answered()
                    raise CoordinatorError(error.details() or reason, reason) from error
                # A look-up of a name may take long, and must not stop the loop.
                pause = await asyncio.to_thread(self._search_on, search, error)
                if reason in TOKEN_REFUSED and deadline - self._clock() <= pause:
                    raise CoordinatorError(error.details() or reason, reason) from error
                if not reason and error.code() in _FINAL:
                    raise CoordinatorError(f"{error.code().name}: {error.details()}") from error
            except EnvironmentValueError as error:
                raise CoordinatorError(str(error)) from error
            else:
                search.answered()
                return response
            await asyncio.sleep(min(pause, max(deadline - self._clock(), 0.0)))

    @asynccontextmanager
    async def _channel(self, target: Target, credentials: Credentials) -> AsyncIterator[grpc.aio.Channel]:
        """Return the connection to an address, shared by the calls that are under way.

        After a failure the next call opens another one, perhaps with new certificates. The one that failed is
        closed after its last call: that would cancel the others.
        """
        if target.address not in self._shared:
            self._shared[target.address] = _SharedChannel(open_aio_channel(target, credentials))
        shared = self._shared[target.address]
        shared.users += 1
        try:
            yield shared.channel
        except grpc.aio.AioRpcError:
            if self._shared.get(target.address) is shared:
                del self._shared[target.address]
            raise
        finally:
            shared.users -= 1
            if not shared.users and self._shared.get(target.address) is not shared:
                await shared.channel.close()

    def _search_on(self, search: Search, error: grpc.aio.AioRpcError) -> float:
        """Continue the search after a call that failed; return the seconds to wait."""
        if reason_of(error) in TOKEN_REFUSED:
            self._credentials.refused()
        fault = self._credentials.fault(error.details() or "")
        return search_on(search, error, str(fault or ""))

    async def close(self) -> None:
        """Close all connections."""
        for shared in self._shared.values():
            await shared.channel.close()
        self._shared.clear()


@dataclass(eq=False, slots=True)
class _SharedChannel:
    """A channel, and how many calls use it."""

    channel: grpc.aio.Channel
    users: int = 0


_FINAL = frozenset(
    {
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
"""Statuses without a reason that another attempt would not change."""
