"""Puts the memory of a state into huge pages between its saves, so that the next fork is short.

A fork copies an entry for each page that the process has, while the training thread waits. 2 MiB are 512
small pages, or one huge one. If this process writes to a huge page that a child still sees, the kernel gives
it small ones. So this is done again when a save is over. Training goes on meanwhile: the kernel moves one
huge page after the other. A thread that touches the page being moved waits.
"""

import ctypes
import errno
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from muster.worker.saves.memory.staging import available_memory, fits

logger = logging.getLogger(__name__)

MADV_COLLAPSE = 25
"""An advice since Linux 6.1 (include/uapi/asm-generic/mman-common.h); Python's mmap does not name it."""
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
GAP = 64 * 1024
"""Bytes that may lie between two tensors of one stretch: an allocator puts words of its own there."""
PIECE = 32 * 2**20
"""Bytes that are moved before it is looked again whether a save has begun."""
NO_ROOM = (errno.ENOMEM, errno.EBUSY)
"""What the kernel answers when the machine, or the container, has no huge page to give; and of memory that
was given back in the meantime."""
REFUSALS = 3
"""So many stretches one after the other that have no room are taken for the machine's answer."""

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Memory, from one address up to another."""

    start: int
    end: int


def collapse(start: int, length: int) -> int:
    """Have the kernel move memory into huge pages now.

    Returns:
        The error's number; 0 if it was done.
    """
    return ctypes.get_errno() if _madvise(start, length, MADV_COLLAPSE) else 0


class HugePages:
    """The memory of the state that was saved last.

    It is known by its addresses, for no state must live longer because of this. What has taken its place
    there in the meantime is moved in its stead, and does not notice.

    Args:
        size: bytes of a huge page; 0 if none are to be used.
        collapse: moves memory, from an address on, for some bytes; returns an error's number.
        room: tells how many bytes of memory can be had.
    """

    def __init__(
        self,
        size: int | None = None,
        collapse: Callable[[int, int], int] = collapse,
        room: Callable[[], int] = available_memory,
    ) -> None:
        self._size = huge_page_size() if size is None else size
        self._collapse = collapse
        self._room = room
        self._latest: list[Stretch] = []

    def saving(self, tensors: Iterable[torch.Tensor]) -> list[Stretch]:
        """A save of tensors on the host begins; what is done for an earlier one stops.

        Returns:
            Their memory, for :meth:`renew` when the save is over.
        """
        self._latest = stretches_of(tensors, self._size) if self._size else []
        return self._latest

    def renew(self, saved: list[Stretch]) -> None:
        """Move the memory of a save that is over into huge pages, unless another save has begun."""
        # A process that was forked meanwhile, such as a data loader's, keeps the old pages.
        if saved and not fits(sum(one.end - one.start for one in saved), self._room()):
            logger.debug("there is little free memory: the next fork takes longer")
            return
        piece = max(PIECE, self._size)
        refusals = 0
        for stretch in saved:
            for start in range(stretch.start, stretch.end, piece):
                if self._latest is not saved:
                    return  # A new child needs the old pages, and they would be there twice.
                if self._collapse(start, min(piece, stretch.end - start)) in NO_ROOM:
                    refusals += 1
                    break
                refusals = 0
            if refusals == REFUSALS:
                logger.debug("there are no huge pages to be had: the next fork takes longer")
                return


def huge_page_size(settings: Path = SETTINGS) -> int:
    """Bytes of a huge page; 0 if the system has none, or its administrator wants none to be used.

    Args:
        settings: the kernel's folder of them.
    """
    try:
        if "[never]" in (settings / "enabled").read_text():
            return 0
        return int((settings / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def stretches_of(tensors: Iterable[torch.Tensor], size: int) -> list[Stretch]:
    """The whole huge pages that the storages of tensors fill, alone or with their neighbours.

    Args:
        tensors: those that are not on the host, or have no single place there, do not count.
        size: bytes of a huge page.
    """
    found: list[Stretch] = []
    storages = [
        tensor.untyped_storage()
        for tensor in tensors
        if tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.data_ptr()
    ]
    for start, end in sorted((one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages):
        if found and start - found[-1].end <= GAP:
            found[-1] = Stretch(found[-1].start, max(found[-1].end, end))
        elif start:
            found.append(Stretch(start, end))
    whole = (Stretch(-(-one.start // size) * size, one.end // size * size) for one in found)
    return [one for one in whole if one.start < one.end]
