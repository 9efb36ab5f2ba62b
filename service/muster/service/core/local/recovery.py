"""Which checkpoint the ranks of a generation resume from. One decision for all: a pure function.

A checkpoint can be resumed from if a connected keeper has each part, verified against the manifest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from muster.service.core.local.copies import Copies, newest_whole
from muster.service.core.vocabulary.local import Attempt, Level
from muster.service.core.vocabulary.report import ranges

RETURN_PATIENCE = 5.0
"""Seconds for which a decision waits for keepers with missing parts, once all ranks have their keepers."""
VERIFY_PATIENCE = 300.0
"""Seconds for which it waits for connected keepers that still verify what is on their disks."""
SHOWN = 20
"""Ranks that a reason names at most."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What the ranks resume from."""

    attempt: Attempt | None
    """None: shared storage."""
    reason: str


def choose(copies: Sequence[Copies], *, waited: float, all_verified: bool) -> Choice | None:
    """Choose what to resume from: the newest whole checkpoint, or a newer one in shared storage.

    Args:
        copies: the checkpoints of the run, from the oldest to the newest.
        waited: seconds since all ranks have connected keepers.
        all_verified: whether all connected keepers have verified what is on their disks.

    Returns:
        The choice; None: wait, since keepers may still come with parts of a newer checkpoint.
    """
    if not copies:
        return Choice(None, "there is no local checkpoint")
    newest, whole = copies[-1], newest_whole(copies)
    if whole is newest:
        return Choice(newest.attempt, f"step {newest.checkpoint.step} is the newest, and whole")
    if waited < (RETURN_PATIENCE if all_verified else VERIFY_PATIENCE):
        return None
    missing = newest.missing()
    lost = (
        f"of step {newest.checkpoint.step} the parts of {len(missing)} of {newest.checkpoint.world_size} "
        f"ranks are on no connected node ({ranges(missing[:SHOWN])}{' …' if len(missing) > SHOWN else ''})"
    )
    persisted = [one for one in copies if one.level is Level.PERSISTED]
    if persisted and (whole is None or persisted[-1].attempt > whole.attempt):
        return Choice(None, f"{lost}; step {persisted[-1].checkpoint.step} in shared storage is the next")
    if whole is None:
        return Choice(None, f"{lost}, and no other local checkpoint is whole")
    return Choice(whole.attempt, f"{lost}; step {whole.checkpoint.step} is the newest that is whole")
