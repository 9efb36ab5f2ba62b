"""State in this process's memory: for tests and trials. It does not survive a restart."""

from collections.abc import Iterator, Mapping


class MemoryEngine:
    """Keeps everything in a dictionary."""

    blocking = False

    def __init__(self) -> None:
        self._data: dict[bytes, bytes] = {}
        self._epoch = 0

    def open(self) -> int:
        """See :class:`~muster.service.storage.engine.Engine`."""
        self._epoch += 1
        return self._epoch

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """See :class:`~muster.service.storage.engine.Engine`."""
        yield from sorted(self._data.items())

    def commit(self, writes: Mapping[bytes, bytes | None]) -> None:
        """See :class:`~muster.service.storage.engine.Engine`."""
        for key, value in writes.items():
            if value is None:
                self._data.pop(key, None)
            else:
                self._data[key] = value

    def close(self) -> None:
        """See :class:`~muster.service.storage.engine.Engine`."""
