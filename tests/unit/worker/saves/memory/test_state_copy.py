"""Copies of states: as torch's own stager makes them, and right where that one is not."""

import threading
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from muster.worker.saves.memory.staging import HostBuffers
from muster.worker.saves.memory.state_copy import StateCopy


class Pair(NamedTuple):
    one: Any
    two: Any


@dataclass
class Record:
    weight: torch.Tensor
    step: int


class Marked(torch.Tensor):
    """A tensor of a class of its own, with a part of its own."""

    mark: Any


class Module(torch.nn.Module):
    """Something with tensors in it that is no container."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)
        self.register_buffer("count", torch.arange(4))


def marked() -> torch.Tensor:
    tensor = torch.arange(3.0).as_subclass(Marked)
    tensor.mark = {"scale": torch.ones(2)}
    return tensor


WEIGHT = torch.arange(24.0).view(4, 6)

TREES: dict[str, Any] = {
    "containers": {"a": [WEIGHT, (WEIGHT + 1, {"b": WEIGHT + 2})], 3: None, "text": "x", "n": 1.5},
    "kinds of dictionaries": [
        OrderedDict(b=WEIGHT, a=1),
        UserDict({"w": WEIGHT}),
        defaultdict(list, w=[WEIGHT]),
    ],
    "named tuple": Pair(WEIGHT, [Pair(1, WEIGHT.clone())]),
    "record": Record(WEIGHT, 3),
    "module": Module(),
    "aliases": [WEIGHT, WEIGHT, WEIGHT.view(-1), WEIGHT[1:3], WEIGHT.detach(), WEIGHT.clone()],
    "strides": [WEIGHT.t(), WEIGHT[:, ::2], WEIGHT[1].expand(3, 6), WEIGHT.as_strided((2, 2), (1, 6), 3)],
    "data types": [
        torch.ones(3, dtype=dtype)
        for dtype in (
            torch.float64,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.int8,
            torch.bool,
            torch.cfloat,
        )
    ],
    "nothing in it": [torch.empty(0), torch.empty(0, 3), torch.empty(2, 0, dtype=torch.int64), {}, [], ()],
    "one number": torch.tensor(3.5),
    "parameters": [torch.nn.Parameter(WEIGHT.clone()), torch.ones(2, requires_grad=True)],
    "subclass": [marked()],
    "arrays": [np.arange(4), {"rng": np.random.default_rng(3).bit_generator.state}],
    "sets": [{1, 2}, frozenset("ab"), bytearray(b"xy"), range(3), slice(1, 2), Ellipsis],
    "not to be copied": [len, marked, torch.float32, torch.device("cpu"), Record, torch.Size([1])],
}


def described(value: Any, seen: dict[int, int], storages: dict[int, int]) -> Any:
    """What a copy is: types, values, and what is the same as what."""
    if not isinstance(value, str | int | float | bytes | type | None) and not callable(value):
        if id(value) in seen:
            return "the same as", seen[id(value)]
        seen[id(value)] = len(seen)
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return (
            type(value),
            (value.dtype, value.shape, value.stride(), value.storage_offset(), value.requires_grad),
            (storages.setdefault(storage.data_ptr(), len(storages)), storage.nbytes()),
            value.as_subclass(torch.Tensor).view(-1 if value.is_contiguous() else value.shape).tolist(),
            described(vars(value), seen, storages),
        )
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        items = [(key, described(item, seen, storages)) for key, item in value.items()]
        return type(value), items
    if isinstance(value, list | tuple):
        return type(value), [described(item, seen, storages) for item in value]
    if isinstance(value, Record | torch.nn.Module | UserDict):
        return type(value), described(vars(value), seen, storages)
    return value


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_copy_is_what_torchs_stager_makes(tree: Any):
    buffers = HostBuffers()
    for _ in range(3):
        ours = buffers.stage(tree)
        theirs = StateDictStager().stage({"state": tree})["state"]
        assert described(ours.state, {}, {}) == described(theirs, {}, {})
        ours.release()


def test_a_copy_shares_no_memory_with_what_was_copied():
    tree: list[Any] = [
        WEIGHT.clone(),
        Record(WEIGHT.clone(), 3),
        Module(),
        marked(),
        np.arange(3),
        {"list": [1]},
    ]
    copied = HostBuffers().stage(tree).state
    before = described(copied, {}, {})
    tree[0].fill_(-1)
    tree[1].weight.fill_(-1)
    tree[2].count.fill_(-1)
    tree[3].mark["scale"].fill_(-1)
    tree[4].fill(-1)
    tree[5]["list"].append(2)
    assert described(copied, {}, {}) == before


def test_a_state_may_hold_itself():
    state: list[Any] = [torch.ones(2)]
    pair = (state, {"again": state})
    state.append(pair)
    copied = StateCopy(torch.UntypedStorage).copy(pair)
    assert copied[0][1] is copied
    assert copied[1]["again"] is copied[0]
    assert copied[0] is not state
    assert copied[0][0].tolist() == [1.0, 1.0]


def test_a_distributed_tensor_keeps_its_mesh_and_has_a_copy_of_its_part(mesh: DeviceMesh):
    """Torch's stager copies the mesh, too; children that are forked afterwards were seen to die of it."""
    tensor = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    local = tensor.to_local()
    tree = {"tensor": tensor, "parameter": torch.nn.Parameter(tensor), "local": local}
    buffers = HostBuffers()
    for step in range(3):
        local.fill_(step)
        held = buffers.stage(tree)
        local.fill_(-1)
        storages = set()
        for name in ("tensor", "parameter"):
            copied = held.state[name]
            assert isinstance(copied, DTensor)
            assert copied.device_mesh is mesh
            assert (copied.placements, copied.shape, copied.requires_grad) == ((Shard(0),), (4, 3), False)
            assert copied.to_local().tolist() == [[float(step)] * 3] * 4
            storages.add(copied.to_local().untyped_storage().data_ptr())
        assert storages == {held.state["local"].untyped_storage().data_ptr()}
        held.release()


def test_the_result_of_a_collective_is_waited_for(mesh: DeviceMesh):
    result = all_reduce(torch.arange(3.0), "sum", mesh)
    assert isinstance(result, AsyncCollectiveTensor)
    copied = HostBuffers().stage([result]).state[0]
    assert type(copied) is torch.Tensor
    assert copied.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
def test_a_sharded_tensor_has_copies_of_its_shards(mesh: DeviceMesh):
    tensor = sharded_tensor.rand(ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 3)
    (shard,) = tensor.local_shards()
    was = shard.tensor.clone()
    copied = HostBuffers().stage([tensor]).state[0]
    shard.tensor.fill_(-1)
    (copy,) = copied.local_shards()
    assert torch.equal(copy.tensor, was)
    assert copy.metadata == shard.metadata
    assert copied.metadata() == tensor.metadata()


ODD: dict[str, Callable[[], torch.Tensor]] = {
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "compressed": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "computed": lambda: torch.ones(2, requires_grad=True) * 2,
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
    "quantized": lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.5, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:.*quantize")
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_tensors_that_torchs_stager_refuses_or_breaks_are_copied(make: Callable[[], torch.Tensor]):
    tensor = make()
    copied = HostBuffers().stage([tensor]).state[0]
    assert (type(copied), copied.dtype, copied.layout) == (type(tensor), tensor.dtype, tensor.layout)
    ours, theirs = (one.values() if one.layout is torch.jagged else one for one in (copied, tensor))
    assert str(ours) == str(theirs.detach())


def test_a_tensor_without_data_stays():
    tensor = torch.ones(3, device="meta")
    assert HostBuffers().stage([tensor]).state[0] is tensor


def test_state_that_cannot_be_copied_is_an_error_and_its_buffers_are_returned():
    buffers = HostBuffers()
    with pytest.raises(TypeError, match="pickle"):
        buffers.stage([torch.ones(3), threading.Lock()])
    assert len(buffers._free) == 1
    assert buffers.stage([torch.ones(3)]).state[0].tolist() == [1.0] * 3


def test_an_object_that_copies_itself_is_asked_to():
    class Own:
        def __deepcopy__(self, memo: dict[int, Any]) -> str:
            return "copied"

    one = Own()
    assert StateCopy(torch.UntypedStorage).copy([one, one]) == ["copied", "copied"]
