"""Copies on the host, and the buffers that they are in."""

import mmap
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lab.patience import PATIENCE
from muster.worker.saves import AsyncRequest, ForkCaller
from muster.worker.saves.memory import staging
from muster.worker.saves.memory.staging import (
    HostBuffers,
    _items_in,
    check_memory,
    leaves_of,
    size_of,
    survive_fork,
    tensors_of,
    unshared,
)
from tests.support.handler import Handler
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.mappings import permissions_at


def test_a_copy_does_not_change_with_what_was_copied():
    weight = torch.arange(10.0)
    held = HostBuffers().stage({"model": [weight, weight[2:4]], "step": 3})
    weight.fill_(-1)
    assert torch.equal(held.state["model"][0], torch.arange(10.0))
    assert torch.equal(held.state["model"][1], torch.tensor([2.0, 3.0]))
    assert held.state["step"] == 3


def test_buffers_are_used_again_only_when_the_write_has_ended():
    buffers, weight = HostBuffers(), torch.zeros(10)
    first = buffers.stage([weight])
    where = first.state[0].data_ptr()
    weight.fill_(1)
    second = buffers.stage([weight])
    assert second.state[0].data_ptr() != where
    assert torch.equal(first.state[0], torch.zeros(10))
    first.release()
    weight.fill_(2)
    third = buffers.stage([weight])
    assert third.state[0].data_ptr() == where
    assert torch.equal(second.state[0], torch.ones(10))
    assert torch.equal(third.state[0], torch.full((10,), 2.0))


def test_buffers_of_a_shared_pool_are_in_shared_memory():
    held = HostBuffers(shared=True).stage({"weight": torch.ones(3)})
    assert permissions_at(held.state["weight"].data_ptr()) == "rw-s"
    private = HostBuffers().stage({"weight": torch.ones(3)})
    assert permissions_at(private.state["weight"].data_ptr()) == "rw-p"


def test_tensors_are_found_wherever_a_state_may_hold_them():
    one, two, three = torch.ones(1), torch.ones(2), torch.nn.Parameter(torch.ones(3))
    assert [t.numel() for t in tensors_of({"a": [one, (two, {"b": three})], "c": 1, "d": None})] == [1, 2, 3]


def test_tensor_in_shared_memory_does_not_survive_a_fork():
    assert survive_fork([torch.ones(3)])
    assert not survive_fork([torch.ones(3), torch.ones(3).share_memory_()])


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.ones(3, device="meta")], ids=str)
def test_tensors_without_a_storage_on_the_host_are_taken_too(tensor: torch.Tensor):
    assert survive_fork([tensor])
    assert unshared({"weight": tensor})["weight"] is tensor


def test_only_what_is_shared_is_copied():
    own, shared = torch.ones(3), torch.ones(3).share_memory_()
    state: dict[str, Any] = {"own": own, "list": [own, shared], "tuple": (shared, 7)}
    copied = unshared(state)
    assert state["list"][1] is shared
    assert copied["own"] is own
    assert copied["list"][0] is own
    assert not copied["list"][1].is_shared()
    assert not copied["tuple"][0].is_shared()
    assert copied["tuple"][1] == 7
    assert unshared([own]) == [own]


@pytest.mark.parametrize(("free", "fits"), [(2_223, True), (2_222, False)])
def test_a_copy_for_which_there_is_no_room_is_refused(free: int, fits: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staging, "available_memory", lambda: free)
    tensors = [torch.zeros(250, dtype=torch.float64)]
    if fits:
        check_memory(size_of(tensors))
    else:
        with pytest.raises(MemoryError, match=r"free memory.*Wait for earlier saves"):
            check_memory(size_of(tensors))


def test_buffers_that_are_there_need_no_free_memory(monkeypatch: pytest.MonkeyPatch):
    buffers = HostBuffers()
    buffers.stage({"weight": torch.zeros(2500)}).release()
    monkeypatch.setattr(staging, "available_memory", lambda: 0)
    buffers.stage({"weight": torch.zeros(2500)}).release()
    with pytest.raises(MemoryError):
        buffers.stage({"weight": torch.zeros(5000)})
    held = buffers.stage({"weight": torch.zeros(2500)})
    with pytest.raises(MemoryError):
        buffers.stage({"weight": torch.zeros(2500)})
    held.release()


class Registry(Mapping[str, Any]):
    """A mapping that is no dictionary, and cannot be changed."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Pair(NamedTuple):
    one: Any
    two: Any


CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda value: {"a": value},
    "OrderedDict": lambda value: OrderedDict(a=value),
    "UserDict": lambda value: UserDict({"a": value}),
    "Mapping": lambda value: Registry({"a": value}),
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "NamedTuple": lambda value: Pair(1, value),
}


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_shared_memory_is_found_in_every_container(
    container: Callable[[Any], Any], kind: str, tmp_path: Path
):
    array = np.memmap(tmp_path / "mapped", np.float32, "w+", shape=(8,))
    value: Any = torch.from_numpy(array) if kind == "tensor" else array
    own = torch.ones(3)
    state = container({"deep": container([value, own, "text"])})
    assert not survive_fork(state)
    assert survive_fork(container({"deep": container([own, "text"])}))
    copied = unshared(state)
    assert type(copied) is type(state)
    assert survive_fork(copied)
    before, after = list(leaves_of(state)), list(leaves_of(copied))
    array[:] = 7
    for old, new in zip(before, after, strict=True):
        assert (new is old) is (old is not value)
    assert [
        float(one) for leaf in after if isinstance(leaf, type(value)) and len(leaf) == 8 for one in leaf
    ] == [0.0] * 8


def test_names_of_one_shared_tensor_stay_one():
    weight = torch.ones(4).share_memory_()
    one, view = unshared([weight, weight[2:]])
    one.fill_(5)
    assert view.tolist() == [5.0, 5.0]
    assert weight.tolist() == [1.0] * 4


def test_a_distributed_tensor_in_shared_memory_is_found(mesh: DeviceMesh):
    local = torch.arange(6.0).view(3, 2).share_memory_()
    tensor = DTensor.from_local(local, mesh, [Shard(0)])
    assert not survive_fork({"weight": tensor})
    copied = unshared({"weight": tensor})["weight"]
    local.fill_(-1)
    assert survive_fork({"weight": copied})
    assert copied.to_local().tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("kind", ["mmap", "memmap", "from_file", "torch.load"])
def test_tensor_in_a_shared_writable_mapping_counts_as_shared(kind: str, tmp_path: Path):
    path = tmp_path / "mapped"
    if kind == "mmap":
        tensor = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.float32)
    elif kind == "memmap":
        tensor = torch.from_numpy(np.memmap(path, np.float32, "w+", shape=(8,)))
    elif kind == "from_file":
        tensor = torch.from_file(str(path), shared=True, size=8)
    else:
        torch.save(torch.zeros(8), path)
        torch.serialization.set_default_mmap_options(mmap.MAP_SHARED)
        try:
            tensor = torch.load(path, mmap=True)
        finally:
            torch.serialization.set_default_mmap_options(mmap.MAP_PRIVATE)
    assert not survive_fork([tensor])
    assert survive_fork([unshared(tensor)])
    part = tensor.view(2, -1)[1]
    assert not survive_fork([part])
    assert survive_fork([torch.empty(0), torch.ones(3).to_sparse(), torch.empty(3, device="meta")])


def test_the_kernel_says_how_much_memory_is_free():
    assert 0 < staging.available_memory() < 2**50


def test_a_container_has_less_than_the_machine(tmp_path: Path):
    of_machine = staging.available_memory(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(staging.available_memory(tmp_path) - of_machine) < 2**32
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\ninactive_file 300000\nactive_file 100000\n")
    assert staging.available_memory(tmp_path) == 500_000


def test_ranks_of_a_node_share_its_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(staging, "available_memory", lambda: 8_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check_memory(1_800)
    with pytest.raises(MemoryError, match=r"for each of this node's 4 ranks \(LOCAL_WORLD_SIZE\)"):
        check_memory(1_801)
    for one in ("", "0", "1", "many"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", one)
        check_memory(7_200)


def test_tensors_that_share_a_storage_take_its_memory_once():
    weight = torch.zeros(1000)
    assert size_of([weight, weight[:10], weight.view(10, 100), torch.zeros(5)]) == 4020


@dataclass(eq=False)
class Average:
    """An object of a training script's, with a tensor in it."""

    weight: Any


@pytest.mark.parametrize("hide", [Average, lambda one: deque([one]), lambda one: [{(1, Average({2: one}))}]])
def test_shared_tensor_in_an_object_does_not_survive_a_fork(hide: Callable[[Any], Any]):
    weight = torch.ones(10).share_memory_()
    state = {"average": hide(weight), "class": np.ndarray, "odd": lambda: None, "step": 3}
    assert not survive_fork(state)
    assert not survive_fork({"average": hide(weight.numpy())})
    assert survive_fork({"average": hide(torch.ones(10)), "class": Average, "odd": lambda: None})


class Slotted:
    """An object without a ``__dict__``, which may hold a lock that no copy can be made of."""

    __slots__ = ("lock", "own", "weight")

    def __init__(self, weight: Any) -> None:
        self.weight = weight
        self.own = torch.ones(3)
        self.lock: Any = None


def _method(weight: Any) -> Any:
    return Average(weight).__repr__


HIDDEN: dict[str, Callable[[Any], Any]] = {
    "dataclass": Average,
    "slots": Slotted,
    "deque": lambda one: deque([one]),
    "set": lambda one: {Average(one)},
    "nested": lambda one: [{(1, Average({2: deque([Slotted(one)])}))}],
    "partial": lambda one: partial(print, one),
    "bound method": _method,
}


@pytest.mark.parametrize("hide", HIDDEN.values(), ids=HIDDEN)
def test_shared_tensor_in_an_object_is_copied(hide: Callable[[Any], Any]):
    weight = torch.ones(10).share_memory_()
    lock = Lock()
    state = [hide(weight), hide(weight.numpy()), {"lock": lock}]
    copied = unshared(state)
    assert survive_fork(copied)
    assert not survive_fork(state)
    assert copied[2]["lock"] is lock
    weight.fill_(7)
    (one,) = [item for item in _items_in(copied[0]) if len(item) == 10]  # type: ignore[arg-type]
    assert one.tolist() == [1.0] * 10  # type: ignore[attr-defined]


def test_handler_that_interrupts_a_copy_anywhere_can_wait_for_another_to_be_released():
    buffers = HostBuffers()

    def interrupt(line: int) -> bool:
        earlier = buffers.stage([torch.ones(3)])
        handler = Handler(staging, line, lambda: in_thread(earlier.release).result(PATIENCE))
        in_thread(lambda: handler.interrupt(lambda: buffers.stage([torch.ones(3)]))).result(PATIENCE)
        return handler.called

    lines = 0
    while interrupt(lines):
        lines += 1
    assert lines > 10


def test_only_the_shared_tensor_of_an_object_is_copied():
    one = Slotted(torch.ones(10).share_memory_())
    copied = unshared([one])[0]
    assert copied is not one
    assert copied.own is one.own
    own = [Slotted(torch.ones(10))]
    assert unshared(own) is own


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_sparse_tensor_of_shared_parts_is_copied(layout: torch.layout):
    dense = torch.eye(3).to_sparse(layout=layout)
    if layout is torch.sparse_coo:
        values = dense.values().share_memory_()
        tensor = torch.sparse_coo_tensor(dense.indices(), values, (3, 3), check_invariants=True)
    else:
        compressed, plain = (
            (dense.crow_indices(), dense.col_indices())
            if layout is torch.sparse_csr
            else (dense.ccol_indices(), dense.row_indices())
        )
        values = dense.values().share_memory_()
        tensor = torch.sparse_compressed_tensor(
            compressed, plain, values, (3, 3), layout=layout, check_invariants=True
        )
    assert not survive_fork([tensor])
    copied = unshared([tensor])[0]
    values.fill_(7)
    assert survive_fork([copied])
    assert torch.equal(copied.to_dense(), torch.eye(3))


@pytest.mark.parametrize("why", ["a lock", "itself"])
def test_object_with_a_shared_tensor_that_cannot_be_copied_is_refused(
    why: str, monkeypatch: pytest.MonkeyPatch
):
    one = Slotted(torch.ones(10).share_memory_())
    if why == "a lock":
        one.lock = Lock()
    else:
        monkeypatch.setattr(Slotted, "__deepcopy__", lambda self, _: self, raising=False)
    with pytest.raises(TypeError, match="a Slotted, holds a tensor or array in shared memory"):
        unshared([one])


def test_shared_tensor_in_a_partial_that_writes_is_copied(tmp_path: Path):
    weight = torch.ones(3).share_memory_()
    written = tmp_path / "written"

    def write(average: Average) -> None:
        written.write_text(str(average.weight.is_shared()))

    started = ForkCaller().start(AsyncRequest(partial(write, Average(weight)), (), []))
    assert started.wait(PATIENCE).failure is None
    assert written.read_text() == "False"
