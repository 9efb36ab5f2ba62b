"""The barriers of a few ranks in one process, decided as the coordinator decides them.

No clock runs. A barrier is late when a test says so: a rank lets the others wait for it in vain.
"""

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


class FakeGroup:
    """The ranks of a run.

    Args:
        world_size: how many there are.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.lost: set[int] = set()
        self._barriers: dict[tuple[str, int], _Barrier] = {}

    def member(self, rank: int, prefix: str = "save") -> "Member":
        """The barrier of one rank."""
        return Member(self, rank, prefix)

    def lose(self, rank: int) -> None:
        """Its process has died: no barrier waits for it, now or later."""
        with self.changed:
            self.lost.add(rank)
            for (prefix, sequence), barrier in self._barriers.items():
                self._decide(prefix, sequence, barrier)
            self.changed.notify_all()

    def outlast(self, member: "Member") -> None:
        """Let a rank come only after the others have been told that it is too late."""
        with self.changed:
            prefix, sequence = member.prefix, member.sequence
            barrier = self._barriers.setdefault((prefix, sequence), _Barrier())
            others = set(range(self.world_size)) - {member.rank}
            waited_for = self.changed.wait_for(
                lambda: barrier.decision is not None or others <= barrier.arrived | self.lost, PATIENCE
            )
            assert waited_for, "the others do not wait"
            if barrier.decision is None:
                barrier.decision = Decision(
                    prefix, sequence, Outcome.TIMED_OUT, "timed out", self._absent(barrier)
                )
                self.changed.notify_all()

    def arrive(self, member: "Member", sequence: int, failure: str | None, payload: bytes) -> Decision:
        """A rank comes to a barrier, and hears what was decided there."""
        with self.changed:
            prefix = member.prefix
            barrier = self._barriers.setdefault((prefix, sequence), _Barrier())
            barrier.arrived.add(member.rank)
            if payload:
                barrier.payloads[member.rank] = payload
            if failure is not None and barrier.decision is None:
                why = Failure(member.rank, "here", 1, failure)
                message = f"rank {member.rank} failed: {failure}"
                missing = self._absent(barrier)
                barrier.decision = Decision(prefix, sequence, Outcome.ABORTED, message, missing, (why,))
            self._decide(prefix, sequence, barrier)
            self.changed.notify_all()
            assert self.changed.wait_for(lambda: barrier.decision is not None, PATIENCE)
            assert barrier.decision is not None
            return barrier.decision

    def has_arrived(self, rank: int, prefix: str, sequence: int) -> bool:
        """Whether a rank is, or was, at a barrier."""
        barrier = self._barriers.get((prefix, sequence))
        return barrier is not None and rank in barrier.arrived

    def _decide(self, prefix: str, sequence: int, barrier: _Barrier) -> None:
        if barrier.decision is not None:
            return
        if len(barrier.arrived) == self.world_size:
            payloads = dict(barrier.payloads)
            barrier.decision = Decision(prefix, sequence, Outcome.RELEASED, "released", payloads=payloads)
        elif barrier.arrived and self.lost - barrier.arrived:
            names = ", ".join(f"rank {rank}" for rank in sorted(self.lost - barrier.arrived))
            missing = self._absent(barrier)
            barrier.decision = Decision(prefix, sequence, Outcome.MEMBER_LOST, f"lost {names}", missing)

    def _absent(self, barrier: _Barrier) -> tuple[MissingRank, ...]:
        states = {rank: MissingState.CONNECTION_LOST for rank in self.lost}
        return tuple(
            MissingRank(rank, "there", 7, states.get(rank, MissingState.NOT_ARRIVED), 0.0)
            for rank in range(self.world_size)
            if rank not in barrier.arrived
        )


class Member(VotingBarrier):
    """One rank's barrier of a group."""

    run_id, generation = "job", 0
    participants: tuple[int, ...] = ()

    def __init__(self, group: FakeGroup, rank: int, prefix: str) -> None:
        self.group = group
        self.rank = rank
        self.prefix = prefix
        self.world_size = group.world_size
        self.sequence = 0
        self.early: list[EarlyWarning | None] = []
        self.reports: list[WriteReport | None] = []
        """What it told at its votes."""
        self.raises: dict[int, list[Exception]] = {}
        """By sequence: at its votes there."""
        self.siblings: dict[str, Member] = {}

    def sibling(self, prefix: str) -> "Member":
        """The same rank's barrier with another prefix."""
        return self.siblings.setdefault(prefix, Member(self.group, self.rank, prefix))

    def vote(
        self,
        failure: str | None = None,
        timeout_secs: float | None = None,
        payload: bytes = b"",
        early: EarlyWarning | None = None,
        report: WriteReport | None = None,
    ) -> Decision:
        """Arrive."""
        self.early.append(early)
        self.reports.append(report)
        if self.raises.get(self.sequence):
            raise self.raises[self.sequence].pop(0)
        decision = self.group.arrive(self, self.sequence, failure, payload)
        self.sequence += 1
        return decision
