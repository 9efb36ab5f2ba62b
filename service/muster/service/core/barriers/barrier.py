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
    """Since when someone waits, on the monotonic clock: perhaps since before this coordinator began."""
    deadline: float
    """When it times out, on the monotonic clock. It never moves to later."""
    progress_at: float | None
    """When those who wait are told next how it stands, on the monotonic clock; None: no more."""
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
    """Whether the missing were asked what they are doing, for the next time that people are told of them."""

    @classmethod
    def begin(
        cls, sequence: int, shape: Shape, timeout: float, progress_after: float, now: float
    ) -> "OpenBarrier":
        """The barrier that the first arrival opens, which is still to be added.

        Args:
            sequence: its number.
            shape: whom it covers.
            timeout: seconds.
            progress_after: seconds until those who wait are told who is missing: at most, and for 0, half of
                the timeout.
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
        """When people are told of the missing next, on the monotonic clock."""
        return self.deadline if self.progress_at is None else self.progress_at

    @property
    def due(self) -> float:
        """When there is something to ask, to tell or to decide."""
        if self.probed:
            return self.reports_at
        # An early warning may come sooner than that; a barrier that is over in no time asks nobody.
        return max(
            self.reports_at - observations.probe_lead(self.timeout), (self.opened_at + self.reports_at) / 2
        )

    def mark_reported(self, now: float) -> None:
        """Those who wait were told how it stands: once more at half of the timeout, if that is to come."""
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
            process: who arrives.
            arrival: what it brings.
            since: when it arrived: now, or before this coordinator began.
            timeout: seconds, of this arrival.
            now: on the monotonic clock.

        Returns:
            How many bytes of payload the barrier holds more.
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
        """An arrival is earlier than those that are known: its timeout counts, unless it would be over later.

        Whom the warning would name may be about to come back, so it waits for them.
        """
        before, self.opened_at = self.opened_at, since
        if since + timeout < self.deadline:
            self.deadline, self.timeout = since + timeout, timeout
        if self.progress_at is not None:
            progress_at = max(self.progress_at - (before - since), now + RECONNECT_GRACE)
            self.progress_at = progress_at if progress_at < self.deadline else None

    def withdraw(self, rank: int) -> int:
        """Take an arrival back, by invariant 11 (the newer fences the older).

        Returns:
            How many bytes of payload the barrier holds less.
        """
        self.arrivals.pop(rank, None)
        if self.last_arrival_rank == rank:
            self.last_arrival_rank = None
        self.reports.pop(rank, None)
        less = len(self.payloads.pop(rank, b""))
        self.payload_bytes -= less
        return less
