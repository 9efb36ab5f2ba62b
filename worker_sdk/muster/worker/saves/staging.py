"""Bringing tensors to the host, into buffers that are kept until the write that reads them has ended.

Pinned memory is not copied on write by a fork, so a buffer that is used again while a child still reads it
gives the child another step's data. Each save in flight therefore holds buffers of its own; when it has ended
they go back to the pool, and the next save copies into them without allocating or pinning.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

HOST = ("cpu", "meta")
"""Devices whose tensors a fork copies, if they have anything in memory at all."""
SPARE_MEMORY = 0.9
"""The part of the free memory that a copy of the state may take."""


@dataclass(slots=True)
class _Buffers:
    """What one state is copied to; torch's stager keeps them."""

    stager: DefaultStager
    size: int = 0
    """Bytes."""


class Held:
    """A state on the host, and the buffers that it is in."""

    def __init__(self, state: Any, buffers: _Buffers, pool: "HostBuffers") -> None:  # noqa: ANN401
        self.state = state
        self._buffers = buffers
        self._pool = pool

    def release(self) -> None:
        """The write has ended: the buffers may be used again."""
        self.state = None
        self._pool.give_back(self._buffers)


class HostBuffers:
    """A pool of host buffers; torch's stager fills them.

    Args:
        shared: whether another process must be able to read them.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._free: list[_Buffers] = []
        self._lock = threading.Lock()

    def stage(self, state: Any) -> Held:  # noqa: ANN401
        """Copy every tensor of a state to the host. What is not a tensor is copied as well.

        The copies from a GPU run on a stream of their own, after what the current stream has been given to
        do; they have ended when this returns.

        Args:
            state: dictionaries, lists and tuples of tensors and other values.

        Raises:
            MemoryError: there is not enough free memory for buffers.
        """
        size = size_of(tensors_of(state))
        with self._lock:
            buffers = self._free.pop() if self._free else _Buffers(self._new_stager())
        try:
            check_memory(size - buffers.size)
            with _side_stream():
                copied = buffers.stager.stage({"state": state})
            assert isinstance(copied, dict)
            synchronize()
        except BaseException:
            self.give_back(buffers)
            raise
        buffers.size = max(buffers.size, size)
        return Held(copied["state"], buffers, self)

    def give_back(self, buffers: _Buffers) -> None:
        """Take buffers back that nobody reads any more."""
        with self._lock:
            self._free.append(buffers)

    def _new_stager(self) -> DefaultStager:
        cuda = torch.cuda.is_available()
        return DefaultStager(
            StagingOptions(
                use_pinned_memory=cuda,
                use_shared_memory=self._shared,
                use_async_staging=False,
                use_non_blocking_copy=cuda,
            )
        )


def _side_stream() -> Any:  # noqa: ANN401
    """A stream for copies, that waits for the current one; nothing without a GPU."""
    if not _uses_gpu():
        return nullcontext()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(side)


def _uses_gpu() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def synchronize() -> None:
    """Wait for what this process has given the GPU to do, if it uses one: for the copies, above all."""
    if _uses_gpu():
        torch.cuda.synchronize()


def tensors_of(state: object) -> list[torch.Tensor]:
    """The tensors of a state; of a distributed tensor, the part that is here."""
    if isinstance(state, dict):
        return [tensor for value in state.values() for tensor in tensors_of(value)]
    if isinstance(state, list | tuple):
        return [tensor for value in state for tensor in tensors_of(value)]
    if not isinstance(state, torch.Tensor):
        return []
    if hasattr(state, "local_shards"):
        return [shard.tensor for shard in state.local_shards()]
    return [state.to_local() if hasattr(state, "to_local") else state]


class SharedMemory:
    """The memory that this process shares with others now, which no fork copies on write.

    Tensors get there by ``share_memory_``, from workers of a data loader, or over a file that is mapped
    to be written.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions = line.split(" ", 2)[:2]
            if permissions.endswith("s"):
                start, end = addresses.split("-")
                self._starts.append(int(start, 16))
                self._ends.append(int(end, 16))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is in it."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.numel() == 0:
            return False  # Only a plain tensor of the host has an address.
        address = tensor.data_ptr()
        place = bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._ends[place]


def survive_fork(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether a forked child sees tensors as they were at the fork, whatever the parent does to them."""
    shared = SharedMemory()
    return not any(
        tensor.device.type not in HOST or tensor.is_pinned() or shared.holds(tensor) for tensor in tensors
    )


def unshared(value: Any, shared: SharedMemory | None = None) -> Any:  # noqa: ANN401
    """The same value, with copies of those tensors that are in shared memory: no fork copies them."""
    tensors = tensors_of(value)
    if not tensors:
        return value  # Without a look at the memory, which is a part of every save's stall.
    shared = shared or SharedMemory()
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        return value.detach().clone() if plain and shared.holds(value) else value
    if not any(shared.holds(tensor) for tensor in tensors):
        return value
    if isinstance(value, dict):
        copied = copy(value)
        copied.update({key: unshared(item, shared) for key, item in value.items()})
        return copied
    if isinstance(value, list):
        return [unshared(item, shared) for item in value]
    if isinstance(value, tuple):
        items = [unshared(item, shared) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of tensors; what shares a storage counts once for each."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def check_memory(wanted: int) -> None:
    """Refuse a copy that the machine has no room for, before it is begun.

    Args:
        wanted: bytes that it takes.

    Raises:
        MemoryError: that is more than :data:`SPARE_MEMORY` of the available memory.
    """
    free = available_memory()
    if not fits(wanted, free):
        raise MemoryError(
            f"a copy of the state takes {wanted / 2**30:.1f} GiB, and there are {free / 2**30:.1f} GiB of "
            "free memory: it would have the process killed. Wait for earlier saves to end, or shard the "
            "state further."
        )


def fits(wanted: int, free: int) -> bool:
    """Whether so many bytes can be taken of those that are free, and :data:`SPARE_MEMORY` be heeded."""
    return wanted <= free * SPARE_MEMORY


def available_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be had without swapping, as the kernel estimates them: of the machine and its container.

    Args:
        cgroup: where a container sees its own limits (control groups, version 2).
    """
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return free
        used = int((cgroup / "memory.current").read_text())
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return free
    # Pages of files are given up before anything is killed.
    return min(free, int(limit) - used + int(counts["inactive_file"]) + int(counts["active_file"]))
