"""The barrier of a job of one rank, for tests of the frameworks' adapters without a coordinator."""

import pytest

from muster.worker.decision import Decision, Outcome
from muster.worker.groups.voting import VotingBarrier
from muster.worker.integrations.commit import commitment, folders


class Alone(VotingBarrier):
    """Decides at once. The barriers of one class are of one group, so they share its sequence."""

    prefix, rank, world_size, run_id, generation = "checkpoint/test", 0, 1, "job", 0
    participants: tuple[int, ...] = ()
    sequence = 0
    outcome = Outcome.RELEASED

    def __init__(self, *_: object) -> None:
        """As the real one is made."""

    def vote(
        self,
        failure: str | None = None,
        timeout_secs: float | None = None,
        payload: bytes = b"",
        early: object = None,
        report: object = None,
    ) -> Decision:
        """Released, but for a failure."""
        number = self._take_number()
        outcome = self.outcome if failure is None else Outcome.ABORTED
        return Decision(self.prefix, number, outcome, failure or "", payloads={0: payload})

    def _take_number(self) -> int:
        type(self).sequence += 1
        return self.sequence - 1


def take_part_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the adapters of this process find no other barrier, for one test."""
    monkeypatch.setattr(commitment, "_last", {})
    monkeypatch.setattr(Alone, "sequence", 0)
    monkeypatch.setattr(folders, "GrpcBarrier", Alone)
    monkeypatch.setattr(folders, "_unfinished_loads", set())
