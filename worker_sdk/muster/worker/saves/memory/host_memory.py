"""The host memory that a save is copied to, and that the next save uses again.

One mapping holds all tensors of a state. So one call pins it, and one file descriptor passes it to another
process. The descriptor needs no space in ``/dev/shm``.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from muster.worker.saves.memory.gpus import synchronize

ALIGNMENT = 128
"""Bytes: a tensor begins at a multiple of it, as torch's own allocators have it, and shares no cache line."""
BUFFER_NAME = "muster-save"
"""The name of each file of shared memory in ``/proc/self/maps``."""
PORTABLE = 1
"""``cudaHostRegisterPortable``: the memory is pinned for every GPU."""


class Location(NamedTuple):
    """Where something is in host memory, for a process that maps the same."""

    block: int
    """The block's number."""
    offset: int
    """Bytes from the block's start."""
    size: int
    """Bytes."""


def aligned(size: int) -> int:
    """Return the bytes that a storage takes in host memory."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class _Block:
    memory: "ctypes.Array[ctypes.c_char]"
    file: int | None
    """The descriptor of the file that is mapped; None for private memory."""
    used: int = 0
    """Bytes."""

    @property
    def start(self) -> int:
        return ctypes.addressof(self.memory)

    @property
    def size(self) -> int:
        return len(self.memory)


class HostMemory:
    """Memory for the storages of one state.

    Pinned memory is shared, too: a fork copies every pinned page that is private (``copy_present_page`` in
    Linux's ``mm/memory.c``), which took 0.4 s to 0.5 s for each GiB beside an H200.

    Args:
        shared: whether another process must be able to map it.
        pinned: whether a GPU copies to it; CUDA must be initialized.
    """

    def __init__(self, *, shared: bool = False, pinned: bool = False) -> None:
        self.pinned = pinned
        self.copying = False
        """Whether a GPU may still copy to it."""
        self._shared = shared or pinned
        self._blocks: list[_Block] = []

    @property
    def size(self) -> int:
        """Bytes, used or not."""
        return sum(block.size for block in self._blocks)

    @property
    def files(self) -> list[int]:
        """The descriptors of the blocks' files, if the memory is shared."""
        return [block.file for block in self._blocks if block.file is not None]

    def begin(self, size: int) -> None:
        """Use all of it again, for another state.

        Args:
            size: bytes that the state takes, each storage :func:`aligned`.

        Raises:
            OSError: there is no memory.
        """
        if self.size < size:
            self._blocks.clear()  # The old ones go before there are new ones.
            self._add(size)
        for block in self._blocks:
            block.used = 0

    def storage(self, size: int) -> torch.UntypedStorage:
        """Return a storage of its own bytes.

        Raises:
            OSError: there is no memory.
        """
        if size == 0:
            return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
        wanted = aligned(size)
        block = next((one for one in self._blocks if one.size - one.used >= wanted), None) or self._add(
            wanted
        )
        storage = storage_at(block.memory, block.used, size)
        block.used += wanted
        return storage

    def find(self, storage: torch.UntypedStorage) -> Location | None:
        """Return where a storage is; None if it is elsewhere."""
        address = storage.data_ptr()
        for number, block in enumerate(self._blocks):
            if block.start <= address < block.start + block.size:
                return Location(number, address - block.start, storage.nbytes())
        return None

    def _add(self, size: int) -> _Block:
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        file = _memory_file(size) if self._shared else None
        memory = _mapped(file, size)
        if file is not None:
            weakref.finalize(memory, os.close, file)
        if self.pinned:
            _pin(memory)
        block = _Block(memory, file)
        self._blocks.append(block)
        return block


def storage_at(memory: "ctypes.Array[ctypes.c_char]", offset: int, size: int) -> torch.UntypedStorage:
    """Return a new storage over a part of some memory, which lives as long as the storage.

    Args:
        memory: the memory.
        offset: where the storage begins there.
        size: its bytes, above 0.
    """
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset).untyped_storage()


def map_files(files: Iterable[int]) -> list["ctypes.Array[ctypes.c_char]"]:
    """Map the blocks of another process, and close their descriptors.

    Args:
        files: the descriptors of :attr:`HostMemory.files`, as they came here.
    """
    mapped = []
    for file in files:
        try:
            mapped.append(_mapped(file, os.fstat(file).st_size))
        finally:
            os.close(file)
    return mapped


def _memory_file(size: int) -> int:
    file = os.memfd_create(BUFFER_NAME)
    try:
        os.ftruncate(file, size)
    except BaseException:
        os.close(file)
        raise
    return file


def _mapped(file: int | None, size: int) -> "ctypes.Array[ctypes.c_char]":
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file is None else mmap.MAP_SHARED
    return (ctypes.c_char * size).from_buffer(mmap.mmap(-1 if file is None else file, size, flags=flags))


def _pin(memory: "ctypes.Array[ctypes.c_char]") -> None:
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    start = ctypes.addressof(memory)
    error = int(cuda.cudaHostRegister(start, len(memory), PORTABLE))
    if error != 0:
        raise RuntimeError(
            f"{len(memory) / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {error}). "
            "Free memory on the host, or look for an earlier error of a kernel: CUDA_LAUNCH_BLOCKING=1."
        )
    # Not when the process ends: CUDA may be gone by then.
    weakref.finalize(memory, _unpin, cuda, start).atexit = False


def _unpin(cuda: Any, start: int) -> None:  # noqa: ANN401
    with suppress(RuntimeError):  # An earlier error of a kernel: then no copy goes on.
        synchronize()  # CUDA does not say that it waits for copies to the memory.
    cuda.cudaHostUnregister(start)
