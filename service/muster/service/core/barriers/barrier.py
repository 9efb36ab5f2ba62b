"""One open barrier: a set of arrivals and a deadline."""

from dataclasses import dataclass, field

from muster.service.core.barriers import observations
from muster.service.core.elapsed import RECONNECT_GRACE
from muster.service.core.membership.process import Process
from muster.service.core.vocabulary.events import Arrival, WriteReport
from muster.service.core.vocabulary.model import Failure, Shape


@dataclass(slots=True, kw_only=True, eq=False)
class OpenBarrier:
    """A barrier that has no decision yet. It opens with its first arrival."""

    sequence: int
    shape: Shape
    timeout: float
    """Seconds; the first arrival's."""
    opened_at: float
    """When the first rank arrived, on the monotonic clock; perhaps under an earlier coordinator."""
    deadline: float
    """When it times out, on the monotonic clock. It never moves to later."""
    progress_at: float | None
    """When the waiting ranks get the next progress report, on the monotonic clock; None: no more."""
    last_arrival_at: float
    last_arrival_rank: int | None = None
    arrivals: dict[int, Process] = field(default_factory=dict)
    """The ranks that have arrived: a set, for invariant 3 (repeated arrivals count once)."""
    payloads: dict[int, bytes] = field(default_factory=dict)
    payload_bytes: int = 0
    failures: list[Failure] = field(default_factory=list)
    reports: dict[int, WriteReport] = field(default_factory=dict)
    """Reports of the ranks that have arrived, by rank; empty if the barrier belongs to no save."""
    probed: bool = False
    """Whether the missing ranks were probed for the next report."""

    @classmethod
    def begin(
        cls, sequence: int, shape: Shape, timeout: float, progress_after: float, now: float
    ) -> "OpenBarrier":
        """Open a barrier for its first arrival, which the caller adds next.

        Args:
            sequence: its number.
            shape: the ranks that must arrive.
            timeout: seconds.
            progress_after: seconds until the waiting ranks learn which ranks are missing: at most, and for 0,
                half of the timeout.
            now: on the monotonic clock.
        """
        return cls(
            sequence=sequence,
            shape=shape,
            timeout=timeout,
            opened_at=now,
            deadline=now + timeout,
            progress_at=now + min(progress_after or timeout, timeout / 2),
            last_arrival_at=now,
        )

    @property
    def reports_at(self) -> float:
        """When the next report names the missing ranks, on the monotonic clock."""
        return self.deadline if self.progress_at is None else self.progress_at

    @property
    def due(self) -> float:
        """When to probe, report or decide next."""
        if self.probed:
            return self.reports_at
        # An early report may come sooner than the lead; then probe at half of the time before it.
        return max(
            self.reports_at - observations.probe_lead(self.timeout), (self.opened_at + self.reports_at) / 2
        )

    def mark_reported(self, now: float) -> None:
        """Plan the next report, after one was sent: at half of the timeout if that is still ahead."""
        self.probed = False
        half = self.opened_at + self.timeout / 2
        self.progress_at = half if now < half else None

    @property
    def complete(self) -> bool:
        """Whether every required rank has arrived."""
        return len(self.arrivals) == self.shape.size

    def add(self, process: Process, arrival: Arrival, since: float, timeout: float, now: float) -> int:
        """Count an arrival; a repeated one changes nothing.

        Args:
            process: the process that arrives.
            arrival: its arrival.
            since: when it first sent the arrival, perhaps to an earlier coordinator.
            timeout: seconds, of this arrival.
            now: on the monotonic clock.

        Returns:
            Payload bytes that it adds.
        """
        if process.rank in self.arrivals:
            return 0
        self.arrivals[process.rank] = process
        if since < self.opened_at:
            self._count_from(since, timeout, now)
        if since >= self.last_arrival_at or self.last_arrival_rank is None:
            self.last_arrival_at = since
            self.last_arrival_rank = process.rank
        if arrival.payload:
            self.payloads[process.rank] = arrival.payload
            self.payload_bytes += len(arrival.payload)
        if arrival.report is not None:
            self.reports[process.rank] = arrival.report
        return len(arrival.payload)

    def _count_from(self, since: float, timeout: float, now: float) -> None:
        """Count the timeout from an earlier arrival, unless that moves the deadline to later.

        The progress report waits for ``RECONNECT_GRACE``, because missing ranks may be about to reconnect.
        """
        before, self.opened_at = self.opened_at, since
        if since + timeout < self.deadline:
            self.deadline, self.timeout = since + timeout, timeout
        if self.progress_at is not None:
            progress_at = max(self.progress_at - (before - since), now + RECONNECT_GRACE)
            self.progress_at = progress_at if progress_at < self.deadline else None

    def withdraw(self, rank: int) -> int:
        """Withdraw an arrival, by invariant 11 (the newer fences the older).

        Returns:
            Payload bytes that it frees.
        """
        self.arrivals.pop(rank, None)
        if self.last_arrival_rank == rank:
            self.last_arrival_rank = None
        self.reports.pop(rank, None)
        less = len(self.payloads.pop(rank, b""))
        self.payload_bytes -= less
        return less
