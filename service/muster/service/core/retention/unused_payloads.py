"""How payloads of unused runs make room for those of others."""

import math
from collections.abc import Iterator

from muster.client.save_votes import PREFIX
from muster.service.core.barriers.group import Group
from muster.service.core.retention.reaper import RunReaper
from muster.service.core.retention.retention import USE_RECORD_INTERVAL
from muster.service.core.run import Run
from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.model import Instant


class UnusedPayloads:
    """The payloads in the kept decisions of unused runs.

    Args:
        runs: all of the coordinator's, by id.
        reaper: knows which of them are unused.
    """

    def __init__(self, runs: dict[str, Run], reaper: RunReaper) -> None:
        self._runs = runs
        self._reaper = reaper
        self._held = 0
        """Bytes of these payloads, until ``_counted_until``."""
        self._counted_until = -math.inf
        """No further run becomes unused before this time, on the monotonic clock."""

    def drop(self, needed: int, now: Instant, effects: Effects) -> None:
        """Drop payloads, those of the run that was unused for longest first.

        Args:
            needed: the bytes to free, above 0. If unused runs do not hold so many, nothing is dropped.
            now: the current time.
            effects: receives the changed decisions.
        """
        # Each arrival at a full coordinator comes here, so the runs are not counted each time.
        if needed > self._held and now.monotonic < self._counted_until:
            return
        unused = self._count(now)
        if needed > self._held:
            return
        for run in unused:
            freed = sum(group.drop_payloads(effects) for group in _groups(run))
            self._held -= freed
            needed -= freed
            if needed <= 0:
                return

    def _count(self, now: Instant) -> list[Run]:
        """Return the unused runs that hold payloads, the one that was unused for longest first."""
        self._held, self._counted_until = 0, now.monotonic + USE_RECORD_INTERVAL
        unused = []
        for run in self._runs.values():
            held = sum(group.payload_bytes for group in _groups(run))
            if not held or run.in_use:
                continue
            if (due := self._reaper.unused_from(run)) <= now.monotonic:
                self._held += held
                unused.append(run)
            else:
                self._counted_until = min(self._counted_until, due)
        return sorted(unused, key=lambda run: run.last_used.monotonic)


def _groups(run: Run) -> Iterator[Group]:
    """Return the groups that may lose their payloads. Votes about saves stay: the core reads them."""
    return (group for prefix, group in run.groups.items() if prefix != PREFIX)
