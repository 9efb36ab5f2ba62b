"""Who is let in. On a Unix socket its file's permissions say it; elsewhere a door does."""

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

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


class Door(Protocol):
    """What stands before every stream and call."""

    def admitted(self, method: str, metadata: Metadata) -> AbstractAsyncContextManager[Visitor]:
        """Let somebody in, for as long as they may be there.

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


class OpenDoor:
    """Lets everyone in who reaches the socket."""

    @asynccontextmanager
    async def admitted(self, method: str, metadata: Metadata) -> AsyncIterator[Visitor]:
        """See ``Door``."""
        yield Anyone()
