"""Which rank writes what of a state that all of them have parts of; planning itself is torch's."""

import io
import pickle
import zlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner


def packed(plan: SavePlan) -> bytes:
    """A plan at rest.

    It says the same words again and again, and is some thousand objects: those of all ranks would take more
    than the metadata, and every collection of garbage would look at them.
    """
    return zlib.compress(pickle.dumps(plan), level=1)


def unpacked(plan: bytes) -> SavePlan:
    """A plan to read.

    Ranks leave their plans for one another in the folder of the save. Only what torch's plans consist of is
    read from there, so that no other code runs.

    Raises:
        pickle.UnpicklingError: there is something else in it.
    """
    known = _Unpickler(io.BytesIO(zlib.decompress(plan))).load()
    if not isinstance(known, SavePlan):
        raise pickle.UnpicklingError(f"a plan is a SavePlan, and this is a {type(known).__name__}.")
    return known


_RECORDS = {f"torch.distributed.checkpoint.{name}" for name in ("planner", "metadata", "filesystem")}
"""The modules of torch whose dataclasses and enumerations make up a plan."""
_OTHERS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
}


class _Unpickler(pickle.Unpickler):
    """Reads plans, and nothing that does something when it is read."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if "." not in name and (module == "torch" or module in _RECORDS):
            found = super().find_class(module, name)
            is_record = isinstance(found, type) and (is_dataclass(found) or issubclass(found, Enum))
            # Not what a module of torch imports from elsewhere, such as Enum itself, which makes classes.
            if isinstance(found, torch.dtype) or (is_record and found.__module__ == module in _RECORDS):
                return found
        raise pickle.UnpicklingError(
            f"{module}.{name} is in the plan of a save, and Muster reads only torch's own records there. If "
            "the planner put it into the plan, let it use numbers, strings, lists and dictionaries."
        )


def _member(kind: object, name: str) -> Enum:
    """Return a member of an enumeration: Python 3.11.2 pickles members as calls of ``getattr``."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        member = kind.__members__.get(name)
        if isinstance(member, kind):
            return member
    raise pickle.UnpicklingError(
        f"{name!r} of {kind!r} is in the plan of a save, and it is no member of an enumeration."
    )


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans of all ranks, which rank 0 knows; packed."""

    proposed: Mapping[int, bytes] = field(default_factory=dict)
    """By rank: all that it has."""
    shares: Mapping[int, bytes] = field(default_factory=dict)
    """By rank: what it writes of that."""
    metadata: Metadata | None = None
    """Torch's metadata of what all ranks write."""

    def changed(
        self, proposed: Mapping[int, bytes], world_size: int, planner: SavePlanner | None = None
    ) -> "Plans":
        """The plans when some ranks have something else to save.

        The others are writing their shares already, and these stay as they are. What they do not cover is
        divided among those who have changed.

        Args:
            proposed: by rank, what those have now.
            world_size: how many ranks there are.
            planner: makes the plan of all ranks; default: torch's.

        Raises:
            ValueError: no rank would write some part, or torch cannot save the whole.
        """
        kept = {rank: unpacked(self._share(rank)) for rank in range(world_size) if rank not in proposed}
        covered = _indices(kept.values())
        divided = [
            kept[rank] if rank in kept else _without(covered, unpacked(proposed[rank]))
            for rank in range(world_size)
        ]
        self._check_whole(kept, _indices(divided))
        planned, metadata = (planner or DefaultSavePlanner()).create_global_plan(divided)
        shares = FileSystemWriter(Path()).prepare_global_plan(planned)  # Names each one's files.
        made = {rank: packed(share) for rank, share in enumerate(shares) if rank in proposed}
        return Plans({**self.proposed, **proposed}, {**self.shares, **made}, metadata)

    def _share(self, rank: int) -> bytes:
        try:
            return self.shares[rank]
        except KeyError:
            raise ValueError(
                f"rank {rank} writes by a plan that rank 0 has not made: one of the two has restarted. "
                "Restart the job on all ranks."
            ) from None

    def _check_whole(self, kept: Iterable[int], written: Set[MetadataIndex]) -> None:
        """Check that unchanged ranks still have what they write for others."""
        for rank in kept:
            for item in unpacked(self.proposed[rank]).items:
                if item.index not in written:
                    raise ValueError(
                        f"rank {rank} has {item.index.fqn} in its state, and the rank that was to write it "
                        "for all has it no more. Change the state of all ranks before the same save. The "
                        "next save makes a new plan."
                    )


def _indices(plans: Iterable[SavePlan]) -> set[MetadataIndex]:
    return {item.index for plan in plans for item in plan.items}


def _without(covered: Set[MetadataIndex], plan: SavePlan) -> SavePlan:
    return replace(plan, items=[item for item in plan.items if item.index not in covered])
