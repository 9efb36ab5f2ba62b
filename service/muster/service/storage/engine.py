"""What every storage engine does, and how it fails."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol


class StorageError(Exception):
    """The state cannot be read or written. The message says where, why, and what to do next."""


class LeadLostError(StorageError):
    """Another replica leads, or may: this one must say nothing more, and end."""


class Engine(Protocol):
    """A small durable map.

    The driver calls :meth:`open` and :meth:`scan` once, then :meth:`commit` from one thread at a time.
    """

    blocking: bool
    """Whether :meth:`commit` waits for a device, so that it belongs on a thread of its own."""
    opening_seconds: float
    """How long :meth:`open` took to make the epoch durable."""

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

    def check_lead(self) -> None:
        """See that nobody else writes there: what is known of the state may be told at this moment.

        Raises:
            LeadLostError: someone may.
        """
        ...

    def commit(self, writes: Mapping[bytes, bytes | None], cleared: Sequence[bytes] = ()) -> None:
        """Write all or nothing; durable when it returns.

        Args:
            writes: key to value; None deletes.
            cleared: every key that begins with one of these is deleted before anything is written. What is
                given must end in a byte below 255.

        Raises:
            StorageError: nothing may be assumed written.
        """
        ...

    def close(self) -> None:
        """Let go of the storage; calling it twice does no harm."""
        ...


def after(prefix: bytes) -> bytes:
    """The least key beyond all that begin with ``prefix``, which ends in a byte below 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
