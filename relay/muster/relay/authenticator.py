"""Decides which callers a relay admits.

On a Unix socket, the permissions of its file decide. On a port, an authenticator does.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeAlias

Read: TypeAlias = Callable[[], Awaitable[Any]]
Metadata = Iterable[tuple[str, str | bytes]]


class Caller(Protocol):
    """An admitted caller, and its rights."""

    def check_run(self, run_id: str) -> None:
        """Check that the caller may open a session for a run.

        Raises:
            Refused: it may not.
        """
        ...

    def check_request(self, method: str, data: bytes) -> None:
        """Check that the relay may forward a call.

        Raises:
            Refused: it may not.
        """
        ...

    def paced(self, read: Read) -> Read:
        """Return the ``read`` of a stream, limited to the caller's rate."""
        ...


class IncomingCall(Protocol):
    """What a call's grpc.aio context says of the caller."""

    def invocation_metadata(self) -> Metadata | None:
        """Return the headers of the call."""
        ...

    def peer(self) -> str:
        """Return gRPC's name of the caller's connection."""
        ...

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return the properties of the connection's TLS, such as the names in the caller's certificate."""
        ...


class Authenticator(Protocol):
    """Checks every stream and call before it is served."""

    def admit(self, method: str, call: IncomingCall) -> AbstractAsyncContextManager[Caller]:
        """Admit a caller for as long as the context is open.

        Args:
            method: the method that is called.
            call: the call.

        Raises:
            Refused: the caller has no access, or has lost it.
        """
        ...


class UnrestrictedCaller:
    """A caller with all rights."""

    def check_run(self, run_id: str) -> None:
        """Allow any run."""

    def check_request(self, method: str, data: bytes) -> None:
        """Allow any call."""

    def paced(self, read: Read) -> Read:
        """Return ``read`` without a limit."""
        return read


class AllowAll:
    """Admits every caller that can connect."""

    @asynccontextmanager
    async def admit(self, method: str, call: IncomingCall) -> AsyncIterator[Caller]:
        """See ``Authenticator``."""
        yield UnrestrictedCaller()
