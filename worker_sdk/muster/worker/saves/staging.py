"""Bringing tensors to the host, into buffers that are kept until the write that reads them has ended.

Pinned memory is not copied on write by a fork, so a buffer that is used again while a child still reads it
gives the child another step's data. Each save in flight therefore holds buffers of its own; when it has ended
they go back to the pool, and the next save copies into them without allocating or pinning.
"""

import threading
from collections.abc import Iterable
from contextlib import nullcontext
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

SPARE_MEMORY = 0.9
"""The part of the free memory that a copy of the state may take."""


class Held:
    """A state on the host, and the buffers that it is in."""

    def __init__(self, state: Any, stager: DefaultStager, pool: "HostBuffers") -> None:  # noqa: ANN401
        self.state = state
        self._stager = stager
        self._pool = pool

    def release(self) -> None:
        """The write has ended: the buffers may be used again."""
        self.state = None
        self._pool.give_back(self._stager)


class HostBuffers:
    """A pool of host buffers; torch's stager fills them.

    Args:
        shared: whether another process must be able to read them.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._free: list[DefaultStager] = []
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
        with self._lock:
            stager = self._free.pop() if self._free else None
        if stager is None:
            check_memory(tensors_of(state))
            stager = self._new_stager()
        with _side_stream():
            copied = stager.stage({"state": state})
        assert isinstance(copied, dict)
        synchronize()
        return Held(copied["state"], stager, self)

    def give_back(self, stager: DefaultStager) -> None:
        """Take buffers back that nobody reads any more."""
        with self._lock:
            self._free.append(stager)

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


def survives_fork(tensor: torch.Tensor) -> bool:
    """Whether a forked child sees a tensor as it was at the fork, whatever the parent does to it."""
    return not (tensor.is_cuda or _is_shared(tensor) or tensor.is_pinned())


def _is_shared(tensor: torch.Tensor) -> bool:
    """Whether it is in the host's shared memory."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False  # Only a plain tensor of the host has a storage that can be asked.
    return bool(tensor.is_shared())  # type: ignore[no-untyped-call]


def unshared(value: Any) -> Any:  # noqa: ANN401
    """The same value, with copies of those tensors that are in shared memory: no fork copies them."""
    if isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter)
        return value.detach().clone() if plain and _is_shared(value) else value
    if not any(_is_shared(tensor) for tensor in tensors_of(value)):
        return value
    if isinstance(value, dict):
        copied = copy(value)
        copied.update({key: unshared(item) for key, item in value.items()})
        return copied
    if isinstance(value, list):
        return [unshared(item) for item in value]
    if isinstance(value, tuple):
        items = [unshared(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def check_memory(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse a copy that the machine has no room for, before it is begun.

    Args:
        tensors: what is to be copied.

    Raises:
        MemoryError: they would take more than :data:`SPARE_MEMORY` of the available memory.
    """
    wanted = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free = available_memory()
    if wanted > free * SPARE_MEMORY:
        raise MemoryError(
            f"the state has {wanted / 2**30:.1f} GiB and this machine {free / 2**30:.1f} GiB of free memory: "
            "a copy would have the process killed. Wait for earlier saves to end, or shard the state further."
        )


def available_memory() -> int:
    """Bytes that can be had without swapping, as the kernel estimates them."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say MemAvailable.")
