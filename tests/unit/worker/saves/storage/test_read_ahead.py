"""Items come in order, at most so many are read before they are asked for, and an error reaches who asks."""

from collections.abc import Iterator
from threading import Barrier, Event

import pytest

from lab.patience import PATIENCE
from muster.worker.saves.storage import read_ahead
from muster.worker.saves.storage.read_ahead import ReadAhead


@pytest.fixture(autouse=True)
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "AHEAD", 100)


class Disk:
    """Fills each buffer with its item's number, and counts."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.buffers: set[int] = set()
        self.fails_at = -1
        self.may_go_on = Event()
        self.may_go_on.set()

    def __call__(self, item: tuple[int, int], buffer: memoryview) -> None:
        assert self.may_go_on.wait(PATIENCE)
        number, length = item
        if number == self.fails_at:
            raise OSError(f"item {number} cannot be read")
        assert len(buffer) == length
        buffer[:] = bytes([number]) * length
        self.read.append(number)
        self.buffers.add(id(buffer.obj))


def reading(disk: Disk, *lengths: int) -> ReadAhead[tuple[int, int]]:
    return ReadAhead(enumerate(lengths), lambda item: item[1], disk)


def drain(items: Iterator[tuple[tuple[int, int], memoryview]]) -> list[bytes]:
    return [bytes(data) for _, data in items]


def test_items_come_in_order_whatever_their_lengths():
    lengths = [10, 0, 300, 1, 100, 99, 2]
    with reading(Disk(), *lengths).start() as items:
        assert drain(items) == [bytes([number]) * length for number, length in enumerate(lengths)]


def test_at_most_so_many_bytes_are_read_ahead():
    disk = Disk()
    with reading(disk, *[40] * 20).start() as items:
        for number, _ in enumerate(items):
            # One item is in use, and two of 40 bytes are within the bound of 100.
            assert len(disk.read) <= number + 3
    assert len(disk.buffers) <= 3


@pytest.mark.parametrize("lengths", [[24, 4, *[1] * 8], [1, 1, 1, 1, 6], [8, 8, 8, 1]], ids=str)
def test_buffers_take_no_more_than_the_bound_and_the_largest_of_them(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(read_ahead, "AHEAD", 32)
    reads = reading(Disk(), *lengths * 20)
    with reads.start() as items:
        for _ in items:
            buffers = [*reads._free, *(one.buffer for one in reads._under_way)]
            assert sum(map(len, buffers)) <= 32 + max(lengths)


def test_two_items_are_read_at_the_same_time():
    both = Barrier(2, timeout=PATIENCE)

    def read(item: tuple[int, int], buffer: memoryview) -> None:
        both.wait()

    with ReadAhead(enumerate([40] * 4), lambda item: item[1], read).start() as items:
        assert len(drain(items)) == 4


def test_item_beyond_the_bound_is_read_alone():
    disk = Disk()
    with reading(disk, 1000, 1000).start() as items:
        next(items)
        assert bytes(next(items)[1]) == bytes([1]) * 1000


def test_read_error_is_raised_when_the_item_is_requested():
    disk = Disk()
    disk.fails_at = 2
    with reading(disk, *[40] * 5).start() as items:
        next(items)
        next(items)
        with pytest.raises(OSError, match="item 2 cannot be read"):
            next(items)


def test_nothing_is_read_after_the_caller_stops():
    disk = Disk()
    disk.may_go_on.clear()
    with pytest.raises(ZeroDivisionError), reading(disk, *[10] * 50).start() as items:
        disk.may_go_on.set()
        next(items)
        raise ZeroDivisionError
    assert len(disk.read) < 50


def test_no_items_are_no_error():
    with reading(Disk()).start() as items:
        assert drain(items) == []
