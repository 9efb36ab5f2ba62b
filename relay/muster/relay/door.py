"""Who is let in. On a Unix socket its file's permissions say it; elsewhere a door does."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeAlias

Read: TypeAlias = Callable[[], Awaitable[Any]]
Metadata = Iterable[tuple[str, str | bytes]]


class Visitor(Protocol):
    """Somebody who was let in, and what they may touch."""

    def check_run(self, run_id: str) -> None:
        """See that a session may be about a run.

        Raises:
            Refused: it may not.
        """
        ...

    def check_request(self, method: str, data: bytes) -> None:
        """See that a call may be passed on.

        Raises:
            Refused: it may not.
        """
        ...

    def paced(self, read: Read) -> Read:
        """The ``read`` of a stream, at the rate that the visitor may have."""
        ...


class Door(Protocol):
    """What stands before every stream and call."""

    def admitted(self, method: str, metadata: Metadata, peer: str) -> AbstractAsyncContextManager[Visitor]:
        """Let somebody in, for as long as they may be there.

        Args:
            method: what they call.
            metadata: the headers of the call.
            peer: gRPC's name of where it comes from.

        Raises:
            Refused: they may not, or no longer.
        """
        ...


class Anyone:
    """Whoever reaches the socket may speak."""

    def check_run(self, run_id: str) -> None:
        """Any run."""

    def check_request(self, method: str, data: bytes) -> None:
        """Any call."""

    def paced(self, read: Read) -> Read:
        """As it is."""
        return read


class OpenDoor:
    """Lets everyone in who reaches the socket."""

    @asynccontextmanager
    async def admitted(self, method: str, metadata: Metadata, peer: str) -> AsyncIterator[Visitor]:
        """See ``Door``."""
        yield Anyone()
