"""Which barriers are traced, so that tracing costs next to nothing however many barriers there are."""

from muster.service.core.vocabulary.model import Decision, Outcome

MAX_RELEASED_PER_SECOND = 20
"""Released barriers that are traced in one second. A span uses 100 µs of CPU, and saves are seconds apart."""


class TraceBudget:
    """Admits every failed barrier, and the first released ones of each second.

    All budgets that see the same decisions admit the same ones.
    """

    def __init__(self) -> None:
        self._second = 0
        self._released = 0

    def admits(self, decision: Decision) -> bool:
        """Return whether a barrier is traced."""
        if decision.outcome is not Outcome.RELEASED:
            return True
        second = int(decision.decided_at)
        if second != self._second:
            self._second, self._released = second, 0
        self._released += 1
        return self._released <= MAX_RELEASED_PER_SECOND
