"""Barriers of several ranks in one process, decided as the coordinator decides them."""

import threading
from dataclasses import dataclass, field

from lab.patience import PATIENCE
from muster.worker.decision import Decision, Failure, MissingRank, MissingState, Outcome
from muster.worker.groups.pending import EarlyWarning
from muster.worker.groups.voting import VotingBarrier
from muster.worker.groups.write_report import WriteReport


@dataclass
class _Barrier:
    payloads: dict[int, bytes] = field(default_factory=dict)
    arrived: set[int] = field(default_factory=set)
    decision: Decision | None = None


class RoundTable:
    """A run of so many ranks.

    Args:
        world_size: how many.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.lost: set[int] = set()
        self._barriers: dict[tuple[str, int], _Barrier] = {}

    def seat(self, rank: int) -> "Seat":
        return Seat(self, rank, "save")

    def lose(self, rank: int) -> None:
        """Its process has died: no barrier waits for it, now or later."""
        with self.changed:
            self.lost.add(rank)
            for (prefix, sequence), barrier in self._barriers.items():
                self._decide(prefix, sequence, barrier)
            self.changed.notify_all()

    def arrive(self, seat: "Seat", sequence: int, failure: str | None, payload: bytes) -> Decision:
        with self.changed:
            barrier = self._barriers.setdefault((seat.prefix, sequence), _Barrier())
            barrier.arrived.add(seat.rank)
            if payload:
                barrier.payloads[seat.rank] = payload
            if failure is not None and barrier.decision is None:
                why = Failure(seat.rank, "here", 1, failure)
                message = f"rank {seat.rank} failed: {failure}"
                barrier.decision = Decision(seat.prefix, sequence, Outcome.ABORTED, message, (), (why,))
            self._decide(seat.prefix, sequence, barrier)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: barrier.decision is not None, PATIENCE)
            assert barrier.decision is not None
            return barrier.decision

    def _decide(self, prefix: str, sequence: int, barrier: _Barrier) -> None:
        if barrier.decision is not None:
            return
        if len(barrier.arrived) == self.world_size:
            barrier.decision = Decision(
                prefix, sequence, Outcome.RELEASED, "released", payloads=dict(barrier.payloads)
            )
        elif lost := sorted(self.lost - barrier.arrived):
            missing = tuple(MissingRank(rank, "there", 7, MissingState.CONNECTION_LOST, 0.0) for rank in lost)
            names = ", ".join(f"rank {rank}" for rank in lost)
            barrier.decision = Decision(prefix, sequence, Outcome.MEMBER_LOST, f"lost {names}", missing)

    def has_arrived(self, rank: int, prefix: str, sequence: int) -> bool:
        barrier = self._barriers.get((prefix, sequence))
        return barrier is not None and rank in barrier.arrived


class Seat(VotingBarrier):
    """One rank's barrier of one group."""

    run_id, generation = "job", 0
    participants: tuple[int, ...] = ()

    def __init__(self, table: RoundTable, rank: int, prefix: str) -> None:
        self.table = table
        self.rank = rank
        self.prefix = prefix
        self.world_size = table.world_size
        self.sequence = 0
        self.early: list[EarlyWarning | None] = []
        self.reports: list[WriteReport | None] = []
        """What it told at its votes."""
        self.raises: dict[int, list[Exception]] = {}
        """By sequence: at its votes there."""
        self.siblings: dict[str, Seat] = {}

    def sibling(self, prefix: str) -> "Seat":
        return self.siblings.setdefault(prefix, Seat(self.table, self.rank, prefix))

    def vote(
        self,
        failure: str | None = None,
        timeout_secs: float | None = None,
        payload: bytes = b"",
        early: EarlyWarning | None = None,
        report: WriteReport | None = None,
    ) -> Decision:
        self.early.append(early)
        self.reports.append(report)
        if self.raises.get(self.sequence):
            raise self.raises[self.sequence].pop(0)
        decision = self.table.arrive(self, self.sequence, failure, payload)
        self.sequence += 1
        return decision
