"""What all barriers at which ranks vote can do, whether a coordinator decides them or not."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from muster.worker.decision import Decision
from muster.worker.errors import OutcomeUnknownError
from muster.worker.groups.pending import EarlyWarning
from muster.worker.groups.write_report import WriteReport


class VotingBarrier(ABC):
    """A barrier at which each rank votes, and all ranks get the same decision."""

    @property
    def has_contact(self) -> bool:
        """Whether this process is connected with what decides; always, unless that is a coordinator."""
        return True

    @abstractmethod
    def vote(
        self,
        failure: str | None = None,
        timeout_secs: float | None = None,
        payload: bytes = b"",
        early: EarlyWarning | None = None,
        report: WriteReport | None = None,
    ) -> Decision:
        """Arrive with a vote, and return the decision whatever it is."""

    def vote_until_decided(
        self,
        on_unknown: Callable[[OutcomeUnknownError], object],
        failure: str | None = None,
        timeout_secs: float | None = None,
        payload: bytes = b"",
        early: EarlyWarning | None = None,
        report: WriteReport | None = None,
    ) -> Decision:
        """Vote as :meth:`vote` does, and repeat the vote while the coordinator cannot be reached.

        A repeated vote is safe: the coordinator counts it once. A rank that leaves without the decision is
        out of step with the others.

        Args:
            on_unknown: called with the error before each repetition. It ends the vote if it raises.
            failure: as for :meth:`vote`.
            timeout_secs: as for :meth:`vote`, for each repetition.
            payload: as for :meth:`vote`.
            early: as for :meth:`vote`.
            report: as for :meth:`vote`.

        Returns:
            The decision; :attr:`Decision.outcome` says what it is.

        Raises:
            RefusedError: the coordinator refused the vote.
        """
        while True:
            try:
                return self.vote(failure, timeout_secs, payload, early, report)
            except OutcomeUnknownError as error:
                on_unknown(error)
