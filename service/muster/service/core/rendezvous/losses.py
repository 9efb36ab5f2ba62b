"""The nodes that a complete round has lost: their connections ended, and they did not come back in time."""

from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.records import ForgetParticipant, ParticipantRecord


class Losses:
    """The lost nodes of the complete round. They stay on record until the round ends.

    Args:
        run_id: the run.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._incarnations: list[str] = []

    def __len__(self) -> int:
        return len(self._incarnations)

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
