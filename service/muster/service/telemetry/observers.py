"""One observer of the driver that forwards to several."""

from muster.service.core.vocabulary.effects import Notice
from muster.service.core.vocabulary.model import Decision
from muster.service.core.vocabulary.records import RoundRecord
from muster.service.driver import Observer


class Observers:
    """Forwards each event of the driver to several observers."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def decided(self, decision: Decision) -> None:
        """Forward a decision."""
        for observer in self._observers:
            observer.decided(decision)

    def round_completed(self, record: RoundRecord) -> None:
        """Forward a complete round."""
        for observer in self._observers:
            observer.round_completed(record)

    def noticed(self, notice: Notice) -> None:
        """Forward a notice."""
        for observer in self._observers:
            observer.noticed(notice)

    def forgotten(self, run_id: str) -> None:
        """Forward the removal of a run."""
        for observer in self._observers:
            observer.forgotten(run_id)

    def committed(self, seconds: float) -> None:
        """Forward a commit."""
        for observer in self._observers:
            observer.committed(seconds)
