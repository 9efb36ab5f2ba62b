"""Which rank writes what of a state that all of them have parts of; planning itself is torch's."""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan


@dataclass(frozen=True, slots=True)
class Plans:
    """The plans of all ranks, which rank 0 knows."""

    proposed: dict[int, SavePlan] = field(default_factory=dict)
    """By rank: all that it has."""
    shares: dict[int, SavePlan] = field(default_factory=dict)
    """By rank: what it writes of that."""
    metadata: Metadata | None = None
    """Of what all write."""

    def changed(self, proposed: dict[int, SavePlan], world_size: int) -> "Plans":
        """The plans when some ranks have something else to save.

        The others are writing their shares already, and these stay as they are. What they do not cover is
        divided among those who have changed.

        Args:
            proposed: by rank, what those have now.
            world_size: how many ranks there are.

        Raises:
            ValueError: something would be written by nobody, or the whole is none that torch can save.
        """
        kept = {rank: self._share(rank) for rank in range(world_size) if rank not in proposed}
        covered = {item.index for share in kept.values() for item in share.items}
        divided = [
            _without(covered, proposed[rank]) if rank in proposed else kept[rank]
            for rank in range(world_size)
        ]
        planned, metadata = DefaultSavePlanner().create_global_plan(divided)
        shares = FileSystemWriter(Path()).prepare_global_plan(planned)  # Names each one's files.
        changed = Plans(self.proposed | proposed, dict(enumerate(shares)), metadata)
        changed._check_whole()
        return changed

    def _share(self, rank: int) -> SavePlan:
        try:
            return self.shares[rank]
        except KeyError:
            raise ValueError(
                f"rank {rank} writes by a plan that rank 0 has not made: one of the two has begun anew. "
                "Restart the job on all ranks."
            ) from None

    def _check_whole(self) -> None:
        written = {item.index for share in self.shares.values() for item in share.items}
        for rank, plan in sorted(self.proposed.items()):
            for item in plan.items:
                if item.index not in written:
                    raise ValueError(
                        f"rank {rank} has {item.index.fqn} in its state, and the rank that was to write it "
                        "for all has it no more. Change the state of all ranks before the same save. The "
                        "next save is planned anew."
                    )


def _without(covered: Set[MetadataIndex], plan: SavePlan) -> SavePlan:
    return replace(plan, items=[item for item in plan.items if item.index not in covered])
