"""Rank processes that work all the while that faults are injected, and the judge of their barriers."""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lab.patience import PACE, PATIENCE
from tests.support.chaos.harness import DrawnFaults
from tests.support.ranks import Identity, Rank, RankFailed
from tests.support.world import history


class Traffic:
    """The rank processes of a chaos test.

    Args:
        chaos: the test. What is wrong is added to it.
        folder: where they are told to end.
        stack: ends them.
        timeout: seconds of each barrier.
    """

    def __init__(self, chaos: DrawnFaults, folder: Path, stack: ExitStack, timeout: float) -> None:
        self._chaos = chaos
        self._end = folder / "end"
        self._stack = stack
        self._timeout = timeout
        self.longest: dict[str, float] = {}
        """Seconds of the slowest barrier, by the fault during which it ended."""

    def start(self, operation: str, identity: Identity) -> Rank:
        """Start a process, which repeats an operation of :mod:`tests.support.ranks` until the end."""
        process = Rank(identity)
        self._stack.callback(process.end)
        more = {"timeout": self._timeout} if operation == "mixed" else {}
        process.tell(operation, until=str(self._end), pause=self._chaos.pause, **more)
        return process

    def end(self) -> None:
        """Let the processes come to their end."""
        self._end.touch()

    def answers(self, processes: Sequence[Rank]) -> Iterator[tuple[Rank, Any]]:
        """Return what processes answer, in the order in which they do; None if an operation failed.

        If one has failed, the others may go on for ever: they get the time of two barriers.
        """
        waiting, deadline = list(processes), time.monotonic() + 2 * PATIENCE
        while waiting and time.monotonic() < deadline:
            for process in [one for one in waiting if one.has_answered()]:
                waiting.remove(process)
                answer = None
                try:
                    answer = process.answer()
                except RankFailed as failure:
                    self._chaos.wrong.append(str(failure))
                    deadline = min(deadline, time.monotonic() + 2 * self._timeout)
                yield process, answer
            time.sleep(PACE)
        self._chaos.wrong += [f"rank {one.rank} of {one.identity.run_id} goes on" for one in waiting]

    def judge_barriers(
        self, processes: Sequence[Rank], killed: Collection[Rank] = (), slowest: float = math.inf
    ) -> None:
        """Judge by what ranks wrote down: one decision, released only with all, nobody out of step or hung.

        Args:
            processes: the ranks whose operation is ``mixed``.
            killed: earlier processes of some ranks. Their history is gone, so their arrivals are unknown.
            slowest: seconds that a barrier may take.
        """
        chaos = self._chaos
        events: list[tuple[float, history.Event]] = []
        for process, took in self.answers(processes):
            for began, seconds in took or []:
                during = next((name for at, name in reversed(chaos.when) if at < began + seconds), "none")
                self.longest[during] = max(self.longest.get(during, 0.0), seconds)
            if process.rank == 0:
                chaos.counts["barriers"] += len(took or [])
            events += process.ask("history")
        longest = max(self.longest.values(), default=0.0)
        if longest > slowest:
            chaos.wrong.append(f"a barrier took {longest:.1f} s")
        in_order = [event for _, event in sorted(events, key=lambda pair: pair[0])]
        gone = {(f"rank {one.rank}", one.identity.run_id) for one in killed}
        chaos.wrong += [
            one
            for one in history.violations(in_order)
            if not any(rank in one and run in one for rank, run in gone)
        ]
        chaos.counts.update(
            event.outcome
            for event in in_order
            if isinstance(event, history.Heard) and event.process.rank == 0
        )

    def slowest(self) -> str:
        """Return the slowest barriers, for an account."""
        return ", ".join(f"{seconds:.1f} s ({name})" for name, seconds in self.longest.items())
