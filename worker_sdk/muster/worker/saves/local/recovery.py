"""The state machine of one recovery, without I/O: when to ask for another decision, and when to give up.

All ranks get the same decisions and hear of the same damage, so all come to the same result.
"""

import enum
from dataclasses import dataclass, field

from muster.checkpoint.damage import CorruptCheckpointError, Damage

MAX_DECISIONS = 8
"""Decisions of one recovery that may fail. Each names copies that keepers have verified, so one is enough
unless nodes die meanwhile, or their memory or disks are bad. The next one must name no local checkpoint."""


class Next(enum.Enum):
    """What all ranks do next."""

    ASK = enum.auto()
    """Ask the coordinator for a decision."""
    LOAD = enum.auto()
    """Load the local checkpoint that it names."""
    SHARED = enum.auto()
    """Load from shared storage."""
    DONE = enum.auto()


@dataclass(slots=True)
class Recovery:
    """One recovery, as every rank sees it.

    Args:
        overwrites: whether a load overwrites all that an earlier one has loaded. If not, damage that is found
            while loading ends the recovery: else the state would mix two checkpoints.
    """

    overwrites: bool
    damages: list[Damage] = field(default_factory=list)
    """What ranks could not read, one for each decision that failed."""
    next: Next = Next.ASK

    @property
    def without_local(self) -> bool:
        """Whether the next decision must name no local checkpoint."""
        return len(self.damages) >= MAX_DECISIONS

    def decided(self, *, local: bool, absent: bool = False) -> None:
        """Apply a decision.

        Args:
            local: whether it names a local checkpoint.
            absent: whether it names checkpoints that may be in shared storage, and none is.
        """
        assert self.next is Next.ASK
        if not absent:
            self.next = Next.LOAD if local else Next.SHARED

    def loaded(self, what: str, damage: Damage | None, *, filled: bool) -> None:
        """Apply the end of a load on all ranks.

        Args:
            what: the checkpoint, for people.
            damage: what a rank could not read, as all ranks heard; None: all have loaded it.
            filled: whether something may have been loaded into the state.

        Raises:
            CorruptCheckpointError: the state is partly filled, and another load need not overwrite that.
        """
        assert self.next is Next.LOAD
        if damage is None:
            self.next = Next.DONE
            return
        self.damages.append(damage)
        if filled and not self.overwrites:
            raise CorruptCheckpointError(
                f"{what} cannot be read: {damage}. The state is partly filled from it, and the planner need "
                "not overwrite that. Build the state again, and call resume() again.",
                tuple(self.damages),
            )
        self.next = Next.ASK
