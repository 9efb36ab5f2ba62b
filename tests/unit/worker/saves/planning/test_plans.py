"""Which rank writes what, when some or all of them have something else than before."""

import gc
import pickle
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItemType

from muster.worker.saves.planning.plans import Plans, _member, packed, unpacked
from tests.support.hostile.mine import Mine


def plan_of(*names: str, size: int = 4) -> bytes:
    planner = DefaultSavePlanner()
    planner.set_up_planner({name: torch.zeros(size) for name in names})
    return packed(planner.create_local_plan())


def names(plan: bytes) -> set[str]:
    return {item.index.fqn for item in unpacked(plan).items}


def shares(plans: Plans) -> list[set[str]]:
    return [names(plans.shares[rank]) for rank in sorted(plans.shares)]


def test_at_first_what_all_have_is_divided():
    plans = Plans().changed({rank: plan_of("a", "b", f"own-{rank}") for rank in range(2)}, 2)
    assert sorted(name for share in shares(plans) for name in share) == ["a", "b", "own-0", "own-1"]
    assert plans.metadata is not None
    assert set(plans.metadata.state_dict_metadata) == {"a", "b", "own-0", "own-1"}
    assert [unpacked(plans.shares[rank]).storage_data.prefix for rank in range(2)] == ["__0_", "__1_"]


def test_unchanged_rank_keeps_its_share_and_the_other_ranks_divide_the_rest():
    first = Plans().changed({rank: plan_of("a", "b", "c") for rank in range(3)}, 3)
    same = first.shares[1]
    plans = first.changed({0: plan_of("a", "b", "c", "d"), 2: plan_of("a", "b", "c", "d")}, 3)
    assert names(plans.shares[1]) == names(same)
    assert sorted(name for share in shares(plans) for name in share) == ["a", "b", "c", "d"]
    assert plans.metadata is not None
    assert set(plans.metadata.state_dict_metadata) == {"a", "b", "c", "d"}
    assert first.shares[1] is same, "a plan that was made is not changed"


def test_plan_that_leaves_an_item_without_a_writer_is_refused():
    first = Plans().changed({rank: plan_of("a", "b") for rank in range(2)}, 2)
    (lost,) = names(first.shares[1])
    (kept,) = names(first.shares[0])
    with pytest.raises(ValueError, match=f"rank 0 has {lost} in its state, and the rank that was to write"):
        first.changed({1: plan_of(kept)}, 2)


def test_a_rank_that_rank_0_has_made_no_plan_for():
    with pytest.raises(ValueError, match=r"rank 1 writes by a plan that rank 0 has not made: .* restarted"):
        Plans().changed({0: plan_of("a")}, 2)


def test_plans_at_rest_are_small_and_no_work_for_the_garbage_collector():
    """Rank 0 keeps those of all ranks, until the job ends, in a process that trains."""
    few = plan_of("a")
    many = plan_of(*(f"layers.{number}.weight" for number in range(1_000)))
    assert len(many) < len(pickle.dumps(unpacked(many))) / 10
    sizes = []
    for proposed in (few, many):
        plans = Plans().changed({0: proposed}, 1)
        assert not any(gc.is_tracked(plan) for plan in (*plans.proposed.values(), *plans.shares.values()))
        sizes.append(len(proposed))
    assert sizes[1] < 100 * sizes[0]


def test_plans_of_states_of_all_kinds_are_read_as_they_were_made():
    planner = DefaultSavePlanner()
    state = {
        "tensors": [torch.ones(2, dtype=kind) for kind in (torch.bfloat16, torch.int64, torch.bool)],
        "sparse": torch.ones(2).to_sparse(),
        "lines": torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last),
        "others": ({"a": 1}, "text", None),
    }
    planner.set_up_planner(state)
    plan = planner.create_local_plan()
    plans = Plans().changed({0: packed(plan)}, 1)
    assert unpacked(packed(plan)) == plan
    assert len(unpacked(plans.shares[0]).items) == len(plan.items)


@pytest.mark.parametrize("inside", [False, True])
def test_plan_that_another_process_left_runs_no_code(tmp_path: Path, inside: bool):
    mine: Any = Mine(tmp_path / "ran")
    left = replace(unpacked(plan_of("a")), planner_data=mine) if inside else mine
    with pytest.raises(pickle.UnpicklingError, match="is in the plan of a save"):
        unpacked(zlib.compress(pickle.dumps(left)))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("thing", [FileSystemWriter, torch.load, torch.nn.Linear, Path])
def test_plan_names_nothing_but_torchs_records(thing: object):
    with pytest.raises(pickle.UnpicklingError, match="is in the plan of a save"):
        unpacked(zlib.compress(pickle.dumps(thing)))


@pytest.mark.parametrize(
    ("kind", "name"),
    [(dict, "update"), (torch, "load"), (WriteItemType, "__class__"), (WriteItemType, "mro")],
)
def test_getattr_in_a_plan_returns_only_members_of_enumerations(kind: object, name: str):
    with pytest.raises(pickle.UnpicklingError, match="it is no member of an enumeration"):
        _member(kind, name)


def test_plan_cannot_name_imports_of_a_torch_module():
    """``Enum`` would make classes."""
    with pytest.raises(pickle.UnpicklingError, match=r"planner\.Enum is in the plan of a save"):
        unpacked(zlib.compress(b"ctorch.distributed.checkpoint.planner\nEnum\n."))
