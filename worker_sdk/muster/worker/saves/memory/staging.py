"""Bringing tensors to the host, into buffers that are kept until the write that reads them has ended.

Pinned buffers are shared with the child, so a buffer that is used again while a child still reads it
gives the child another step's data. Each save in flight therefore holds buffers of its own; when it has ended
they go back to the pool, and the next save copies into them without allocating or pinning.
"""

import gc
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from muster.worker.saves.memory.gpus import synchronize, uses_gpu
from muster.worker.saves.memory.host_memory import BUFFER_NAME, HostMemory, aligned
from muster.worker.saves.memory.state_copy import ATOMS, StateCopy

HOST = ("cpu", "meta")
"""Devices whose tensors a fork copies, if they have anything in memory at all."""
SPARE_MEMORY = 0.9
"""The part of the free memory that a copy of the state may take."""
ARRAY = "__array_interface__"
"""The attribute that tells a NumPy array; NumPy may not be installed."""
_OWN_BUFFER = f"/memfd:{BUFFER_NAME} (deleted)"
"""The end of the lines of ``/proc/self/maps`` for the buffers of saves."""
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
"""The variable in which torchrun says how many ranks this node has."""


class Held:
    """A state on the host, and the memory that it is in. Copies from a GPU may still be under way."""

    def __init__(self, state: Any, memory: HostMemory, pool: "HostBuffers") -> None:  # noqa: ANN401
        self.state = state
        self.memory = memory
        self._pool = pool

    def wait(self) -> None:
        """Wait for the copies: only then may the state be read, and what it was copied from be changed."""
        if self.memory.copying:
            synchronize()
            self.memory.copying = False

    def release(self) -> None:
        """The write has ended, or will not begin: the memory may be used again."""
        self.state = None
        self._pool.give_back(self.memory)


class HostBuffers:
    """A pool of host memory for copies of states.

    Args:
        shared: whether another process must be able to read them.
    """

    def __init__(self, *, shared: bool = False) -> None:
        self._shared = shared
        self._free: list[HostMemory] = []
        """Each change is one call: a signal handler must not wait for a lock that its own thread holds."""

    def stage(self, state: Any) -> Held:  # noqa: ANN401
        """Copy every tensor of a state to the host. What is not a tensor is copied as well.

        The copies from a GPU run on its current stream, after the work that is queued there. They have ended
        when :meth:`Held.wait` returns.

        Args:
            state: dictionaries, lists and tuples of tensors and other values.

        Raises:
            MemoryError: there is not enough free memory for buffers.
        """
        tensors = tensors_of(state)
        if any(tensor.device.type == "cpu" and tensor.is_pinned() for tensor in tensors):
            synchronize()  # Copies to it may be under way: a preload function's, or an optimizer's.
        size = sum(aligned(storage.nbytes()) for storage in storages_of(tensors))
        memory = self._take()
        held = Held(None, memory, self)
        try:
            held.wait()  # If nobody has waited for the copies of the save that had it.
            check_memory(size - memory.size)
            memory.begin(size)
            memory.copying = True
            held.state = StateCopy(memory.storage).copy(state)
        except BaseException:
            held.release()
            raise
        return held

    def _take(self) -> HostMemory:
        pinned = uses_gpu()
        with suppress(IndexError):
            memory = self._free.pop()
            if memory.pinned or not pinned:  # Else it is from before this process used a GPU.
                return memory
        return HostMemory(shared=self._shared, pinned=pinned)

    def give_back(self, memory: HostMemory) -> None:
        """Take memory back that nobody reads any more."""
        self._free.append(memory)


# ---------------------------------------------------------------------- what a state consists of


def leaves_of(state: object) -> Iterator[object]:
    """The values in mappings and lists, where torch's planner looks for tensors, and in tuples."""
    if isinstance(state, Mapping):
        for value in state.values():
            yield from leaves_of(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from leaves_of(value)
    else:
        yield state


def tensors_of(state: object) -> list[torch.Tensor]:
    """The tensors of a state; of a distributed tensor, the parts that are here."""
    return [part for leaf in leaves_of(state) if isinstance(leaf, torch.Tensor) for part in _parts_of(leaf)]


def _parts_of(tensor: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401
    if hasattr(tensor, "local_shards"):
        for shard in tensor.local_shards():
            yield from _parts_of(shard.tensor)
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, torch.Tensor):  # A DTensor has its mesh among them.
                yield from _parts_of(part)
    else:
        yield tensor


def storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """The storages of tensors, each once. One without data does not count, nor does a sparse tensor."""
    storages = {
        id(storage): storage
        for tensor in tensors
        if tensor.layout is torch.strided and tensor.device.type != "meta"
        for storage in (tensor.untyped_storage(),)
    }
    return list(storages.values())


class SharedMemory:
    """The memory that this process shares with others now, which no fork copies on write.

    Tensors get there by ``share_memory_``, from workers of a data loader, or over a file that is mapped
    to be written. The buffers of saves do not count: nobody changes them while a save reads them.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions = line.split(" ", 2)[:2]
            if permissions.endswith("s") and not line.endswith(_OWN_BUFFER):
                start, end = addresses.split("-")
                self._starts.append(int(start, 16))
                self._ends.append(int(end, 16))

    def holds(self, value: object) -> bool:
        """Whether a tensor or an array of numpy's is in it."""
        address = _address_of(value)
        place = bisect_right(self._starts, address) - 1
        return place >= 0 and address < self._ends[place]

    def holds_part_of(self, item: object) -> bool:
        """Whether a part of a tensor, such as a DTensor's, or an array is in it."""
        return any(map(self.holds, _data_of(item)))


def _address_of(value: Any) -> int:  # noqa: ANN401
    """Return the address of a tensor's or array's data; 0 if it has no single place on the host."""
    if isinstance(value, torch.Tensor):
        on_host = value.device.type == "cpu" and value.layout is torch.strided and value.numel() > 0
        return value.data_ptr() if on_host else 0
    interface: dict[str, Any] = getattr(value, ARRAY)
    address: int = interface["data"][0]
    return address


def survive_fork(state: object) -> bool:
    """Return whether a forked child sees a state as it was at the fork, whatever its parent changes."""
    memory = SharedMemory()
    parts = [part for leaf in leaves_of(state) for item in _items_in(leaf) for part in _data_of(item)]
    tensors = [one for one in parts if isinstance(one, torch.Tensor)]
    return not any(tensor.device.type not in HOST or tensor.is_pinned() for tensor in tensors) and not any(
        map(memory.holds, parts)
    )


def _items_in(leaf: object) -> Sequence[object]:
    """Return the tensors and arrays that a value holds: itself, or those in its attributes and items."""
    if type(leaf) in ATOMS:
        return ()
    if isinstance(leaf, torch.Tensor) or _is_array(leaf):
        return (leaf,)
    return list(_held_by(leaf))


def _held_by(holder: object) -> Iterator[object]:
    """Return the tensors and arrays that an object holds.

    The garbage collector knows what an object holds, whatever the object is: a dataclass, a set, a deque, one
    with slots. Functions, classes and modules are passed over, as they are by a copy.
    """
    found: set[int] = set()
    left = [holder]
    while left:
        value = left.pop()
        if type(value) in ATOMS or isinstance(value, type | ModuleType) or id(value) in found:
            continue
        found.add(id(value))
        if isinstance(value, torch.Tensor) or _is_array(value):
            yield value
        else:
            left += gc.get_referents(value)


def _data_of(item: object) -> Iterator[object]:
    """Return the parts of a tensor or array that have a place in memory each."""
    if not isinstance(item, torch.Tensor):
        yield item
        return
    for part in _parts_of(item):
        if part.layout is torch.strided:
            yield part
        elif part.layout is torch.sparse_coo:
            yield from (part._indices(), part._values())
        elif part.layout in (torch.sparse_csr, torch.sparse_bsr):
            yield from (part.crow_indices(), part.col_indices(), part.values())
        elif part.layout in (torch.sparse_csc, torch.sparse_bsc):
            yield from (part.ccol_indices(), part.row_indices(), part.values())
        else:
            yield part


def _is_array(value: object) -> bool:
    """Whether this is an array of numpy's; the class of arrays has the same attribute."""
    return hasattr(type(value), ARRAY) and not isinstance(value, type)


def unshared(state: Any) -> Any:  # noqa: ANN401
    """Return the same state, with copies of what is in shared memory: no fork copies that.

    Args:
        state: dictionaries, lists and tuples of tensors and other values. An object that holds something in
            shared memory is copied, without its other tensors and arrays.

    Raises:
        TypeError: an object that holds something in shared memory cannot be copied.
    """
    leaves = {id(leaf): leaf for leaf in leaves_of(state)}
    held = {key: items for key, leaf in leaves.items() if (items := _items_in(leaf))}
    if not held:
        return state  # Without a look at the memory, which is a part of every save's stall.
    memory = SharedMemory()
    shared = [leaf for key, leaf in leaves.items() if any(map(memory.holds_part_of, held.get(key, ())))]
    if not shared:
        return state
    own = [item for items in held.values() for item in items if not memory.holds_part_of(item)]
    copies = StateCopy(torch.UntypedStorage, own)
    # This makes new containers, with the same items.
    return deepcopy(state, leaves | {id(leaf): _copied(leaf, copies, memory) for leaf in shared})


def _copied(leaf: Any, copies: StateCopy, memory: SharedMemory) -> Any:  # noqa: ANN401
    """Return a copy of a value that holds something in shared memory.

    Raises:
        TypeError: it cannot be copied.
        MemoryError: there is no room for it.
    """
    why: object = "its copy holds the same memory"
    try:
        copied = copies.copy(leaf)
        if not any(map(memory.holds_part_of, _items_in(copied))):
            return copied
    except MemoryError:
        raise
    except Exception as error:
        why = error
    raise TypeError(
        f"an argument, a {type(leaf).__name__}, holds a tensor or array in shared memory, which the child "
        f"would read while training changes it. It cannot be copied: {why}. Pass the tensor itself, or copy "
        "it before the save."
    )


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the storages of tensors; a sparse tensor does not count."""
    return sum(storage.nbytes() for storage in storages_of(tensors))


def check_memory(wanted: int) -> None:
    """Refuse a copy that the machine has no room for, before it is begun.

    The node's ranks save at the same time, and each of them is to have an equal part of the free memory.

    Args:
        wanted: bytes that it takes.

    Raises:
        MemoryError: that is more than :data:`SPARE_MEMORY` of this rank's part.
    """
    ranks = local_ranks()
    free = available_memory() // ranks
    if not fits(wanted, free):
        part = f" for each of this node's {ranks} ranks ({LOCAL_WORLD_SIZE})" if ranks > 1 else ""
        raise MemoryError(
            f"a copy of the state takes {wanted / 2**30:.1f} GiB, and there are {free / 2**30:.1f} GiB of "
            f"free memory{part}: it would have the process killed. Wait for earlier saves to end, or shard "
            "the state further."
        )


def local_ranks() -> int:
    """Return the number of ranks on this node, as torchrun says; 1 if it does not."""
    given = os.environ.get(LOCAL_WORLD_SIZE, "")
    return max(1, int(given)) if given.isdecimal() else 1


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
