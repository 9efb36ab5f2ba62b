"""State in memory, for tests and trials. It does not survive a restart."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence

from muster.service.storage.engine import after


class MemoryEngine:
    """Stores everything in a dictionary, with its keys in order."""

    blocking = False
    opening_seconds = 0.0

    def __init__(self) -> None:
        self._data: dict[bytes, bytes] = {}
        self._keys: list[bytes] = []
        self._epoch = 0

    def open(self) -> int:
        """See :class:`~muster.service.storage.engine.Engine`."""
        self._epoch += 1
        return self._epoch

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """See :class:`~muster.service.storage.engine.Engine`."""
        yield from [(key, self._data[key]) for key in self._keys]

    def check_lead(self) -> None:
        """See :class:`~muster.service.storage.engine.Engine`."""

    def commit(self, writes: Mapping[bytes, bytes | None], cleared: Sequence[bytes] = ()) -> None:
        """See :class:`~muster.service.storage.engine.Engine`."""
        for prefix in cleared:
            self._delete(bisect_left(self._keys, prefix), bisect_left(self._keys, after(prefix)))
        for key, value in writes.items():
            if value is not None:
                if key not in self._data:
                    insort(self._keys, key)
                self._data[key] = value
            elif key in self._data:
                at = bisect_left(self._keys, key)
                self._delete(at, at + 1)

    def _delete(self, first: int, end: int) -> None:
        for key in self._keys[first:end]:
            del self._data[key]
        del self._keys[first:end]

    def close(self) -> None:
        """See :class:`~muster.service.storage.engine.Engine`."""
