"""The barriers of a few ranks, which are threads here, without a coordinator: decided as it decides them.

No clock runs. A barrier is late when a test says so: a rank lets the others wait for it in vain.
"""

import threading
from dataclasses import replace

from lab.patience import PATIENCE
from muster.worker.decision import Decision, Failure, MissingRank, MissingState, Outcome
from muster.worker.groups.voting import VotingBarrier


class FakeGroup:
    """A group of ranks.

    Args:
        world_size: how many there are.
    """

    def __init__(self, world_size: int) -> None:
        self.seats = [Seat(self, rank, world_size) for rank in range(world_size)]
        self._changed = threading.Condition()
        self._decided: list[Decision] = []
        self._words: dict[int, bytes] = {}
        """Of those that have arrived at the next barrier."""
        self._gone: set[int] = set()

    def leave(self, rank: int) -> None:
        """A rank ends, and is lost wherever it is waited for."""
        with self._changed:
            self._gone.add(rank)
            self._check()

    def outlast(self, rank: int) -> None:
        """A rank does not come until the others, who wait for it, have been told that time is over."""
        with self._changed:
            waited_for = self._changed.wait_for(
                lambda: len(self._words.keys() | self._gone | {rank}) == len(self.seats), PATIENCE
            )
            assert waited_for, "the others do not wait"
            if rank not in self._words:
                self._decide(Outcome.TIMED_OUT)

    def arrive(self, seat: "Seat", failure: str | None, word: bytes) -> Decision:
        """A rank comes to its next barrier, and hears what was decided there."""
        with self._changed:
            sequence = seat.sequence
            if sequence == len(self._decided):
                self._words[seat.rank] = word
                if failure is None:
                    self._check()
                else:
                    self._decide(Outcome.ABORTED, Failure(seat.rank, "here", 7, failure))
                self._changed.notify_all()
            assert self._changed.wait_for(lambda: sequence < len(self._decided), PATIENCE)
            seat.sequence += 1
            return self._decided[sequence]

    def _check(self) -> None:
        if self._words and len(self._words.keys() | self._gone) == len(self.seats):
            self._decide(Outcome.RELEASED if len(self._words) == len(self.seats) else Outcome.MEMBER_LOST)

    def _decide(self, outcome: Outcome, *failures: Failure) -> None:
        decision = Decision("checkpoint/dcp", len(self._decided), outcome, outcome.value, failures=failures)
        if outcome is Outcome.RELEASED:
            decision = replace(decision, payloads={r: word for r, word in self._words.items() if word})
        else:
            absent = [seat.rank for seat in self.seats if seat.rank not in self._words]
            missing = (MissingRank(r, "here", 7, MissingState.NOT_ARRIVED, 0.0) for r in absent)
            decision = replace(decision, missing=tuple(missing))
        self._decided.append(decision)
        self._words = {}
        self._changed.notify_all()


class Seat(VotingBarrier):
    """What one rank has of a group: what an adapter asks of its barrier."""

    prefix, run_id, generation = "checkpoint/dcp", "job", 0

    def __init__(self, group: FakeGroup, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.sequence = 0
        self._group = group

    def vote(
        self,
        failure: str | None = None,
        timeout_secs: float | None = None,
        payload: bytes = b"",
        early: object = None,
        report: object = None,
    ) -> Decision:
        """Arrive."""
        return self._group.arrive(self, failure, payload)
