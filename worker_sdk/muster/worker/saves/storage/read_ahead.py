"""Reads the items of a checkpoint on other threads, before they are asked for."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

W = TypeVar("W")

AHEAD = 32 * 2**20
"""Bytes that are read before they are asked for, at most; at least one item."""
FREE = 8
"""Buffers that are kept to be used again, at most."""
READERS = 2
"""Threads that read: one reads an item while the other computes the digest of the item before."""


@dataclass(frozen=True, slots=True)
class _UnderWay(Generic[W]):
    item: W
    buffer: bytearray
    data: Future[memoryview]


class ReadAhead(Generic[W]):
    """Reads items in the order in which they are wanted.

    Buffers are used again: the kernel takes longer to map a new page than this process takes to fill it.
    All buffers together take no more than ``AHEAD`` and the largest of them.

    Args:
        wanted: the items.
        length: returns an item's length in bytes.
        read: fills a buffer with an item. Several threads call it.
    """

    def __init__(
        self, wanted: Iterable[W], length: Callable[[W], int], read: Callable[[W, memoryview], None]
    ) -> None:
        self._wanted = deque(wanted)
        self._length = length
        self._read = read
        self._under_way: deque[_UnderWay[W]] = deque()
        self._size = 0
        """Bytes of the buffers of the items that are under way."""
        self._free: list[bytearray] = []

    @contextmanager
    def start(self) -> Iterator[Iterator[tuple[W, memoryview]]]:
        """Start to read.

        Yields:
            The items and their bytes, which are valid until the next item is asked for. The iterator raises
            what ``read`` raises.
        """
        with ThreadPoolExecutor(READERS, thread_name_prefix="muster-load") as pool:
            try:
                yield self._items(pool)
            finally:
                for one in self._under_way:
                    one.data.cancel()

    def _items(self, pool: ThreadPoolExecutor) -> Iterator[tuple[W, memoryview]]:
        self._submit(pool)
        while self._under_way:
            one = self._under_way.popleft()
            data = one.data.result()
            self._size -= len(one.buffer)
            self._submit(pool)
            yield one.item, data
            self._free.append(one.buffer)
            self._submit(pool)

    def _submit(self, pool: ThreadPoolExecutor) -> None:
        while self._wanted and (not self._under_way or self._size + self._length(self._wanted[0]) <= AHEAD):
            item = self._wanted.popleft()
            length = self._length(item)
            buffer = self._buffer(length)
            self._size += len(buffer)
            self._under_way.append(_UnderWay(item, buffer, pool.submit(self._fill, item, buffer, length)))

    def _buffer(self, length: int) -> bytearray:
        for number, buffer in enumerate(self._free):
            if length <= len(buffer) <= 2 * length:
                return self._free.pop(number)
        while self._free and (
            len(self._free) >= FREE or self._size + sum(map(len, self._free)) + length > AHEAD
        ):
            del self._free[0]
        return bytearray(length)

    def _fill(self, item: W, buffer: bytearray, length: int) -> memoryview:
        data = memoryview(buffer)[:length]
        self._read(item, data)
        return data
