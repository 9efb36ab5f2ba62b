"""What every storage engine does, and how it fails."""

from collections.abc import Iterator, Mapping
from typing import Protocol


class StorageError(Exception):
    """The state cannot be read or written. The message says where, why, and what to do next."""


class Engine(Protocol):
    """A small durable map.

    The driver calls :meth:`open` and :meth:`scan` once, then :meth:`commit` from one thread at a time.
    """

    blocking: bool
    """Whether :meth:`commit` waits for a device, so that it belongs on a thread of its own."""

    def open(self) -> int:
        """Take hold of the storage.

        Returns:
            How often it has been opened, this time included: the epoch.

        Raises:
            StorageError: it cannot be opened, or belongs to someone else.
        """
        ...

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key with its value.

        Raises:
            StorageError: it cannot be read.
        """
        ...

    def commit(self, writes: Mapping[bytes, bytes | None]) -> None:
        """Write all or nothing; durable when it returns.

        Args:
            writes: key to value; None deletes.

        Raises:
            StorageError: nothing may be assumed written.
        """
        ...

    def close(self) -> None:
        """Let go of the storage; calling it twice does no harm."""
        ...
