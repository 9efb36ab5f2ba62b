"""Puts the memory of a state into huge pages between its saves, so that the next fork is short.

A fork copies an entry for each page that the process has, while the training thread waits. 2 MiB are 512
small pages, or one huge one. Who writes to a huge page that a child still sees is given small ones for it,
so this is done anew when a save is over. Training goes on meanwhile: the kernel moves one huge page after
the other, and only who touches that very one waits.
"""

import ctypes
import errno
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

MADV_COLLAPSE = 25
"""Of Linux from 6.1 on (include/uapi/asm-generic/mman-common.h); Python's mmap does not name it."""
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
GAP = 64 * 1024
"""Bytes that may lie between two tensors of one stretch: an allocator puts words of its own there."""
PIECE = 32 * 2**20
"""Bytes that are moved before it is looked again whether a save has begun."""
NO_ROOM = (errno.ENOMEM, errno.EBUSY)
"""What the kernel answers when the machine, or the container, has no huge page to give."""


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
    libc = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(start), ctypes.c_size_t(length)
    return ctypes.get_errno() if libc.madvise(address, size, MADV_COLLAPSE) else 0


class HugePages:
    """The memory of the state that was saved last.

    It is known by its addresses, for no state must live longer because of this. What has taken its place
    there in the meantime is moved in its stead, and does not notice.

    Args:
        size: bytes of a huge page; 0 if none are to be used.
        collapse: moves memory, from an address on, for some bytes; returns an error's number.
    """

    def __init__(self, size: int | None = None, collapse: Callable[[int, int], int] = collapse) -> None:
        self._size = huge_page_size() if size is None else size
        self._collapse = collapse
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
        for stretch in saved:
            for start in range(stretch.start, stretch.end, PIECE):
                if self._latest is not saved:
                    return  # A new child needs the old pages, and they would be there twice.
                problem = self._collapse(start, min(PIECE, stretch.end - start))
                if problem in NO_ROOM:
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
    except FileNotFoundError:
        return 0


def stretches_of(tensors: Iterable[torch.Tensor], size: int) -> list[Stretch]:
    """The whole huge pages that tensors fill, alone or with their neighbours.

    Args:
        tensors: those that are not on the host, or have no single place there, do not count.
        size: bytes of a huge page.
    """
    found: list[Stretch] = []
    for start, end in sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size())
        for tensor in tensors
        if tensor.device.type == "cpu" and tensor.layout is torch.strided
    ):
        if found and start - found[-1].end <= GAP:
            found[-1] = Stretch(found[-1].start, max(found[-1].end, end))
        elif start:
            found.append(Stretch(start, end))
    whole = (Stretch(-(-one.start // size) * size, one.end // size * size) for one in found)
    return [one for one in whole if one.start < one.end]
