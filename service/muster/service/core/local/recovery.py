"""Which checkpoint the ranks of a generation resume from. One decision for all: a pure function.

A checkpoint can be resumed from if a connected keeper has each part, verified against the manifest.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from muster.service.core.local.copies import Copies
from muster.service.core.local.selection import newest_persisted, newest_whole, unsettled
from muster.service.core.vocabulary.local import Attempt, Level
from muster.service.core.vocabulary.model import SessionId
from muster.service.core.vocabulary.report import ranges

RETURN_PATIENCE = 5.0
"""Seconds for which a decision waits for keepers with missing parts, once all ranks have their keepers.
They count again when a stream of a keeper ends, since it may come back."""
VERIFY_PATIENCE = 300.0
"""Seconds for which it waits for connected keepers that still verify what is on their disks."""
SHOWN = 20
"""Ranks that a reason names at most."""


@dataclass(slots=True)
class PendingRecovery:
    """A decision that ranks wait for."""

    generation: int
    number: int
    world_size: int
    without_local: bool = False
    """Whether the ranks ask for no local checkpoint."""
    waiters: set[SessionId] = field(default_factory=set)
    covered_at: float | None = None
    """When all ranks had connected keepers, on the monotonic clock."""
    lost_at: float = -math.inf
    """When the last stream of a keeper ended; it need not be one of a rank."""

    def waits_until(self, *, is_verified: bool) -> float:
        """Return until when the decision waits, on the same clock. All ranks have connected keepers.

        Args:
            is_verified: whether the connected keepers have verified all that they can.
        """
        assert self.covered_at is not None
        longest = self.covered_at + VERIFY_PATIENCE
        return min(max(self.covered_at, self.lost_at) + RETURN_PATIENCE, longest) if is_verified else longest


@dataclass(frozen=True, slots=True)
class Choice:
    """What the ranks resume from."""

    attempt: Attempt | None
    """None: shared storage."""
    reason: str
    last: Attempt | None = None
    """The newest attempt that is not abandoned; None: all are."""
    doubtful: tuple[Copies, ...] = ()
    """Without an attempt: the checkpoints that may be in shared storage, from the newest to the oldest."""


def choose(copies: Sequence[Copies], *, may_wait: bool, without_local: bool = False) -> Choice | None:
    """Choose what to resume from: the newest whole checkpoint, or a newer one in shared storage.

    A checkpoint that a process was permitted to commit may be in shared storage. If it is newer than all
    others that can be resumed from, the ranks must look there first.

    Args:
        copies: the checkpoints of the run, from the oldest to the newest.
        may_wait: whether the decision may still wait for keepers that come back, or verify their disks.
        without_local: whether the ranks could not load several local checkpoints, and ask for none.

    Returns:
        The choice; None: wait, since keepers may still come with parts of a newer checkpoint.
    """
    if not copies:
        return Choice(None, "there is no local checkpoint")
    newest, whole = copies[-1], None if without_local else newest_whole(copies)
    if whole is newest:
        return Choice(
            newest.attempt, f"step {newest.checkpoint.step} is the newest, and whole", newest.attempt
        )
    if may_wait and not without_local and _may_come(copies, whole):
        return None
    lost = _lost(newest) if not without_local else "the ranks could not load what several decisions named"
    persisted = newest_persisted(copies)
    known = max((one.attempt for one in (whole, persisted) if one is not None), default=None)
    if doubtful := tuple(unsettled(copies, known)):
        step = doubtful[0].checkpoint.step
        return Choice(None, f"{lost}; step {step} may be in shared storage", doubtful[0].attempt, doubtful)
    if persisted is not None and (whole is None or persisted.attempt > whole.attempt):
        step = persisted.checkpoint.step
        return Choice(None, f"{lost}; step {step} in shared storage is the next", persisted.attempt)
    if whole is None:
        none = "shared storage is resumed from" if without_local else "no other local checkpoint is whole"
        return Choice(None, f"{lost}, and {none}")
    step = whole.checkpoint.step
    return Choice(whole.attempt, f"{lost}; step {step} is the newest that is whole", whole.attempt)


def _may_come(copies: Sequence[Copies], whole: Copies | None) -> bool:
    """Whether keepers may bring parts of a checkpoint that is newer than all that can be resumed from."""
    alone = [one for one in copies if one.is_in_shared_storage_alone and one.level is Level.PERSISTED]
    best = max((one.attempt for one in (whole, *alone[-1:]) if one is not None), default=Attempt(-1, -1))
    return any(one.attempt > best and not one.is_in_shared_storage_alone for one in copies)


def _lost(newest: Copies) -> str:
    step, missing = newest.checkpoint.step, newest.missing()
    if newest.is_in_shared_storage_alone:
        return f"step {step} was written to shared storage, because a node had no room"
    return (
        f"of step {step} the parts of {len(missing)} of {newest.checkpoint.world_size} "
        f"ranks are on no connected node ({ranges(missing[:SHOWN])}{' …' if len(missing) > SHOWN else ''})"
    )
