"""Which barriers are traced, so that tracing costs next to nothing however many barriers there are."""

from collections import Counter

from muster.service.core.vocabulary.model import Decision, Outcome

MAX_RELEASED_PER_SECOND = 20
"""Released barriers that are traced in one second. A span uses 100 µs of CPU, and saves are seconds apart."""
MAX_RELEASED_PER_GROUP = 2
"""Released barriers of one group of a run that are traced in one second, so that it leaves some to others."""


class TraceBudget:
    """Admits every failed barrier, and the first released ones of each second and of each group in it.

    All budgets that see the same decisions admit the same ones.
    """

    def __init__(self) -> None:
        self._second = 0
        self._released = 0
        self._by_group: Counter[tuple[str, str]] = Counter()
        """Released barriers that were admitted in this second, by run and prefix: at most
        ``MAX_RELEASED_PER_SECOND`` entries."""

    def admits(self, decision: Decision) -> bool:
        """Return whether a barrier is traced."""
        if decision.outcome is not Outcome.RELEASED:
            return True
        second = int(decision.decided_at)
        if second != self._second:
            self._second, self._released = second, 0
            self._by_group.clear()
        group = decision.run_id, decision.prefix
        if self._released >= MAX_RELEASED_PER_SECOND or self._by_group[group] >= MAX_RELEASED_PER_GROUP:
            return False
        self._released += 1
        self._by_group[group] += 1
        return True
