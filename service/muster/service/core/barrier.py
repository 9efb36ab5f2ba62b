"""One open barrier: a set of arrivals and a deadline."""

from dataclasses import dataclass, field

from muster.service.core.model import Failure, Shape
from muster.service.core.process import Process


@dataclass(slots=True, kw_only=True, eq=False)
class OpenBarrier:
    """A barrier that has no decision yet. It opens with its first arrival."""

    sequence: int
    shape: Shape
    timeout: float
    """Seconds; the first arrival's."""
    opened_at: float
    """Monotonic."""
    progress_at: float | None
    """When those who wait are told next how it stands, on the monotonic clock; None: no more."""
    last_arrival_at: float
    last_arrival_rank: int | None = None
    arrivals: dict[int, Process] = field(default_factory=dict)
    """Who has arrived, by rank: a set, so arriving twice counts once (design rule 3)."""
    payloads: dict[int, bytes] = field(default_factory=dict)
    payload_bytes: int = 0
    failures: list[Failure] = field(default_factory=list)

    @property
    def deadline(self) -> float:
        """When it times out, on the monotonic clock."""
        return self.opened_at + self.timeout

    @property
    def due(self) -> float:
        """When there is something to tell, or to decide."""
        return self.deadline if self.progress_at is None else self.progress_at

    def told(self, now: float) -> None:
        """Those who wait were told how it stands: once more at half of the timeout, if that is to come."""
        half = self.opened_at + self.timeout / 2
        self.progress_at = half if now < half else None

    @property
    def complete(self) -> bool:
        """Whether every required rank has arrived."""
        return len(self.arrivals) == self.shape.size

    def add(self, process: Process, payload: bytes, now: float) -> None:
        """Count an arrival; a repeated one changes nothing."""
        if process.rank in self.arrivals:
            return
        self.arrivals[process.rank] = process
        self.last_arrival_at = now
        self.last_arrival_rank = process.rank
        if payload:
            self.payloads[process.rank] = payload
            self.payload_bytes += len(payload)

    def withdraw(self, rank: int) -> None:
        """Take an arrival back, because a newer incarnation speaks for the rank (design rule 11)."""
        self.arrivals.pop(rank, None)
        if self.last_arrival_rank == rank:
            self.last_arrival_rank = None
        self.payload_bytes -= len(self.payloads.pop(rank, b""))
