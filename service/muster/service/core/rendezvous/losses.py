"""The nodes that a complete round has lost: they left it, or did not come back in time.

The others' workers may wait for theirs in a collective.
"""

import math

from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.records import ForgetParticipant, ParticipantRecord

RESTART_TIME = 60.0
"""Seconds within which agents that hear of a loss have ended their workers. They look at every
``--monitor-interval``, and kill what has not ended 30 s after SIGTERM."""


class Losses:
    """The lost nodes of the complete round. They stay on record until the round ends.

    Args:
        run_id: the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._incarnations: list[str] = []
        self._told_at = -math.inf

    def __len__(self) -> int:
        return len(self._incarnations)

    def tell(self, count: int, now: float) -> None:
        """Record that agents are told of so many losses.

        Args:
            count: 0: they are not to restart.
            now: the time, on the monotonic clock.
        """
        self._told_at = now if count else -math.inf

    def agents_restart(self, now: float) -> bool:
        """Whether agents that were told of a loss may be ending their workers now."""
        return now < self._told_at + RESTART_TIME

    def restore(self, record: ParticipantRecord) -> None:
        """Restore a lost node."""
        self._incarnations.append(record.node.incarnation)

    def add(self, record: ParticipantRecord, effects: Effects) -> None:
        """Add a node that has just been lost."""
        self._incarnations.append(record.node.incarnation)
        effects.records.append(record)

    def end_round(self, effects: Effects) -> None:
        """Forget all of them, because the round ended."""
        effects.records.extend(ForgetParticipant(self._run_id, one) for one in self._incarnations)
        self._incarnations.clear()
        self._told_at = -math.inf
