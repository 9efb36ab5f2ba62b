"""The memory of a state, in huge pages: which, when, and that nothing of it changes."""

import errno
import mmap
import os
import threading
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from muster.worker.saves.memory.huge_pages import (
    GAP,
    NO_ROOM,
    PIECE,
    HugePages,
    Stretch,
    collapse,
    huge_page_size,
    stretches_of,
)

HUGE = 2**21
KIB = 2**10


@dataclass(frozen=True)
class MemoryRange:
    """Some memory, as a storage says where it is."""

    start: int
    length: int

    def data_ptr(self) -> int:
        return self.start

    def nbytes(self) -> int:
        return self.length


class At(torch.Tensor):
    """A tensor that says that it is somewhere."""

    memory: MemoryRange

    def untyped_storage(self) -> Any:
        return self.memory


def at(start: int, length: int) -> torch.Tensor:
    tensor = torch.empty(1, dtype=torch.uint8).as_subclass(At)
    tensor.memory = MemoryRange(start, length)
    return tensor


class Kernel:
    """Moves memory, or has none."""

    def __init__(self, answers: dict[int, int] | None = None) -> None:
        self.moved: list[tuple[int, int]] = []
        self._answers = answers or {}

    def __call__(self, start: int, length: int) -> int:
        self.moved.append((start, length))
        return self._answers.get(len(self.moved), 0)


def test_only_whole_huge_pages_are_moved():
    assert stretches_of([at(HUGE + 64, 3 * HUGE)], HUGE) == [Stretch(2 * HUGE, 4 * HUGE)]
    assert stretches_of([at(HUGE + 64, HUGE)], HUGE) == []


def test_small_tensors_fill_one_with_their_neighbours():
    neighbours = [at(HUGE + number * 64 * KIB, 60 * KIB) for number in reversed(range(64))]
    assert stretches_of(neighbours, HUGE) == [Stretch(HUGE, 2 * HUGE)]


def test_tensors_far_apart_are_two_stretches():
    far = [at(HUGE, HUGE), at(2 * HUGE + GAP + 1, 2 * HUGE)]
    assert stretches_of(far, HUGE) == [Stretch(HUGE, 2 * HUGE), Stretch(3 * HUGE, 4 * HUGE)]


def test_a_tensor_without_a_place_on_the_host_does_not_count():
    others = [torch.eye(3).to_sparse(), torch.ones(3, device="meta"), at(0, 4 * HUGE)]
    assert stretches_of(others, HUGE) == []


@given(st.lists(st.tuples(st.integers(1, 50 * HUGE), st.integers(0, 5 * HUGE)), max_size=8))
def test_stretches_are_aligned_apart_and_within_what_tensors_span(places: list[tuple[int, int]]):
    stretches = stretches_of([at(start, length) for start, length in places], HUGE)
    for stretch in stretches:
        assert stretch.start % HUGE == stretch.end % HUGE == 0
        assert stretch.start < stretch.end
        assert any(start <= stretch.start < start + length for start, length in places)
    for one, two in pairwise(stretches):
        assert one.end <= two.start
    assert sum(one.end - one.start for one in stretches) <= sum(length + GAP for _, length in places)


def test_all_of_a_state_is_moved_piece_by_piece():
    kernel = Kernel()
    pages = HugePages(HUGE, kernel)
    pages.renew(pages.saving([at(PIECE, 2 * PIECE + HUGE), at(8 * PIECE, HUGE)]))
    assert kernel.moved == [(PIECE, PIECE), (2 * PIECE, PIECE), (3 * PIECE, HUGE), (8 * PIECE, HUGE)]


def test_nothing_is_moved_for_a_save_that_another_has_followed():
    kernel = Kernel()
    pages = HugePages(HUGE, kernel)
    first = pages.saving([at(PIECE, PIECE)])
    second = pages.saving([at(PIECE, PIECE)])
    pages.renew(first)
    assert kernel.moved == []
    pages.renew(second)
    assert kernel.moved == [(PIECE, PIECE)]


def test_a_save_that_begins_stops_it():
    moved = []

    def move(start: int, length: int) -> int:
        moved.append((start, length))
        pages.saving([])
        return 0

    pages = HugePages(HUGE, move)
    pages.renew(pages.saving([at(PIECE, 5 * PIECE)]))
    assert moved == [(PIECE, PIECE)]


@pytest.mark.parametrize(
    ("problem", "calls"), [(errno.ENOMEM, 2), (errno.EBUSY, 2), (errno.EINVAL, 4), (errno.EAGAIN, 4)]
)
def test_it_leaves_memory_that_was_given_back_and_passes_what_cannot_be_moved(problem: int, calls: int):
    kernel = Kernel({1: problem})
    pages = HugePages(HUGE, kernel)
    pages.renew(pages.saving([at(PIECE, 3 * PIECE), at(8 * PIECE, PIECE)]))
    assert len(kernel.moved) == calls
    assert kernel.moved[-1] == (8 * PIECE, PIECE)


@pytest.mark.parametrize(("refused", "calls"), [({1, 2, 3}, 3), ({1, 2, 4, 5}, 6)])
def test_it_ends_where_there_is_no_room(refused: set[int], calls: int):
    kernel = Kernel(dict.fromkeys(refused, errno.ENOMEM))
    pages = HugePages(HUGE, kernel)
    pages.renew(pages.saving([at(8 * number * PIECE, PIECE) for number in range(1, 7)]))
    assert len(kernel.moved) == calls


@pytest.mark.parametrize(("room", "calls"), [(PIECE, 0), (2 * PIECE, 1)])
def test_nothing_is_moved_where_its_old_pages_may_be_kept_and_there_is_no_room_for_both(
    room: int, calls: int
):
    """A process that was forked before, such as a data loader's, keeps them."""
    kernel = Kernel()
    pages = HugePages(HUGE, kernel, lambda: room)
    pages.renew(pages.saving([at(PIECE, PIECE)]))
    assert len(kernel.moved) == calls


def test_a_view_that_repeats_its_memory_takes_no_more_than_there_is():
    """Else memory of others is moved, or none is: the kernel refuses where there is nothing."""
    bias = torch.zeros(2 * HUGE, dtype=torch.uint8)
    assert stretches_of([bias.expand(100, 2 * HUGE)], HUGE) == stretches_of([bias], HUGE)


def test_pages_larger_than_a_piece_are_moved_whole():
    kernel = Kernel()
    huge = 16 * PIECE
    pages = HugePages(huge, kernel, lambda: 2**40)
    pages.renew(pages.saving([at(huge, 2 * huge)]))
    assert kernel.moved == [(huge, huge), (2 * huge, huge)]


def test_where_there_are_none_nothing_is_done():
    kernel = Kernel()
    pages = HugePages(0, kernel)
    pages.renew(pages.saving([at(PIECE, PIECE)]))
    assert kernel.moved == []


@pytest.mark.parametrize(
    ("enabled", "size"),
    [("always [madvise] never", HUGE), ("[always] madvise never", HUGE), ("always madvise [never]", 0)],
)
def test_huge_pages_disabled_by_the_administrator_are_not_used(tmp_path: Path, enabled: str, size: int):
    (tmp_path / "enabled").write_text(f"{enabled}\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{HUGE}\n")
    assert huge_page_size(tmp_path) == size


def test_a_system_without_the_settings_has_none(tmp_path: Path):
    assert huge_page_size(tmp_path) == 0
    (tmp_path / "enabled").write_text("[always] madvise never\n")
    (tmp_path / "hpage_pmd_size").write_text("\n")
    assert huge_page_size(tmp_path) == 0


def test_memory_is_the_same_afterwards_while_training_changes_it():
    weight = torch.zeros(16 * 2**20 // 4)
    pages = HugePages(HUGE)
    ended = threading.Event()

    def train() -> None:
        for _ in range(50):
            weight.add_(1)
        ended.set()

    training = threading.Thread(target=train)
    training.start()
    while not ended.is_set():
        pages.renew(pages.saving([weight]))
    training.join()
    assert torch.equal(weight, torch.full_like(weight, 50))


def test_the_kernel_moves_it_or_says_why_not():
    # Memory of an allocator's may be in several mappings, and no huge page reaches from one into another.
    memory = mmap.mmap(-1, 16 * 2**20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    weight = torch.frombuffer(memory, dtype=torch.float32).fill_(1)
    (stretch,) = stretches_of([weight], HUGE)
    problem = collapse(stretch.start, stretch.end - stretch.start)
    release = tuple(map(int, os.uname().release.split(".")[:2]))
    if huge_page_size() and release >= (6, 1):
        assert problem in (0, errno.EAGAIN, *NO_ROOM)
        assert problem or huge_bytes(weight) >= 7 * HUGE
    else:
        assert problem == errno.EINVAL


def huge_bytes(tensor: torch.Tensor) -> int:
    """How much of the mapping that a tensor is in is in huge pages."""
    here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word = line.split()[0]
        if "-" in word:
            start, end = (int(address, 16) for address in word.split("-"))
            here = start <= tensor.data_ptr() < end
        elif here and word == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    raise AssertionError("the tensor is in no mapping")
