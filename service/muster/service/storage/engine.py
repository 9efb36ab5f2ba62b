"""The protocol of storage engines, and their errors."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol


class StorageError(Exception):
    """The state cannot be read or written. The message says where, why, and what to do next."""


class LeadLostError(StorageError):
    """Another replica may lead: this one must send nothing more, and end."""


class Engine(Protocol):
    """A small durable map from keys to values.

    The driver calls :meth:`open` and :meth:`scan` once, then :meth:`commit` from one thread at a time.
    """

    blocking: bool
    """Whether :meth:`commit` waits for a device and needs a thread of its own."""
    opening_seconds: float
    """Seconds that :meth:`open` took to make the epoch durable."""

    def open(self) -> int:
        """Open the storage and keep others from using it.

        Returns:
            The epoch: how often the storage has been opened, this time included.

        Raises:
            StorageError: the storage cannot be opened, or belongs to another program.
        """
        ...

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield every key with its value.

        Raises:
            StorageError: the storage cannot be read.
        """
        ...

    def check_lead(self) -> None:
        """Check that no other replica can write, so that the known state may be sent at this moment.

        Raises:
            LeadLostError: another replica may write.
        """
        ...

    def commit(self, writes: Mapping[bytes, bytes | None], cleared: Sequence[bytes] = ()) -> None:
        """Write all or nothing. The changes are durable when it returns.

        Args:
            writes: key to value; None deletes.
            cleared: prefixes of keys that are deleted before anything is written. Each must end in a byte
                below 255.

        Raises:
            StorageError: the commit failed; do not assume that anything was written.
        """
        ...

    def close(self) -> None:
        """Close the storage. A second call does nothing."""
        ...


def after(prefix: bytes) -> bytes:
    """Return the first key after all keys with a prefix, which ends in a byte below 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])
