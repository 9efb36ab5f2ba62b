"""Several observers of the driver as one."""

from muster.service.core.vocabulary.effects import Notice, RoundRecord
from muster.service.core.vocabulary.model import Decision
from muster.service.driver import Observer


class Observers:
    """Tells several observers of the driver the same."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def decided(self, decision: Decision) -> None:
        """A barrier was decided."""
        for observer in self._observers:
            observer.decided(decision)

    def round_completed(self, record: RoundRecord) -> None:
        """A rendezvous has brought its nodes together."""
        for observer in self._observers:
            observer.round_completed(record)

    def noticed(self, notice: Notice) -> None:
        """Something that an operator may want to know."""
        for observer in self._observers:
            observer.noticed(notice)

    def forgotten(self, run_id: str) -> None:
        """Nothing is left of a run."""
        for observer in self._observers:
            observer.forgotten(run_id)

    def committed(self, seconds: float) -> None:
        """A batch of records is durable."""
        for observer in self._observers:
            observer.committed(seconds)
