"""What every system's client offers to the load processes."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

# A barrier that no rank is missing from ends in far less; this only bounds a run that went wrong.
BARRIER_TIMEOUT_S = 60

Barrier = Callable[[int], None]


@dataclass(frozen=True)
class LoadSpec:
    """The ranks that one load process plays, and the server that they connect to."""

    port: int
    ranks: range
    world_size: int
    ranks_per_connection: int


@dataclass(frozen=True)
class RankTimes:
    """When one rank arrived at each barrier and when it was released, on CLOCK_MONOTONIC."""

    arrivals_ns: list[int]
    releases_ns: list[int]


@dataclass(frozen=True)
class RoundTimes:
    """For each barrier: the last arrival and the last release of all the ranks of one or more processes."""

    last_arrivals_ns: list[int]
    last_releases_ns: list[int]

    @classmethod
    def of_ranks(cls, ranks: Iterable[RankTimes]) -> "RoundTimes":
        """Reduce the times of several ranks, or of the ranks of several processes."""
        times = list(ranks)
        return cls(
            [max(column) for column in zip(*(rank.arrivals_ns for rank in times), strict=True)],
            [max(column) for column in zip(*(rank.releases_ns for rank in times), strict=True)],
        )

    @classmethod
    def merge(cls, parts: Iterable["RoundTimes"]) -> "RoundTimes":
        """Reduce the times of several processes, which share one clock."""
        return cls.of_ranks(RankTimes(part.last_arrivals_ns, part.last_releases_ns) for part in parts)


class Load(Protocol):
    """The ranks of one load process."""

    def connect(self) -> None:
        """Connect every rank; returns once all of them may arrive."""

    def run(self, rounds: int) -> RoundTimes:
        """Take every rank through the next `rounds` barriers, back to back."""


class BlockingLoad:
    """Ranks whose barrier is a blocking call that gives up the GIL: a thread for each."""

    def __init__(self, ranks: Sequence[int], connect: Callable[[int], Barrier]) -> None:
        self._ranks = ranks
        self._connect = connect
        self._threads = ThreadPoolExecutor(len(ranks))
        self._barriers: list[Barrier] = []
        self._sequence = 0

    def connect(self) -> None:
        """Connect every rank, all at the same time."""
        self._barriers = list(self._threads.map(self._connect, self._ranks))

    def run(self, rounds: int) -> RoundTimes:
        """Take every rank through the next `rounds` barriers."""
        sequences = range(self._sequence, self._sequence + rounds)
        self._sequence += rounds
        return RoundTimes.of_ranks(self._threads.map(lambda b: _pass_barriers(b, sequences), self._barriers))


def _pass_barriers(barrier: Barrier, sequences: range) -> RankTimes:
    times = RankTimes([], [])
    for sequence in sequences:
        times.arrivals_ns.append(time.monotonic_ns())
        barrier(sequence)
        times.releases_ns.append(time.monotonic_ns())
    return times
