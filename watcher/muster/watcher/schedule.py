"""Which notices are in force, and when each is sent to the coordinator. It does no I/O and reads no clock.

Each notice in force is sent at once, and then every ``REPEAT`` seconds: runs may come to the node later. Each
run obeys a notice once.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from muster.watcher.notice import Notice

REPEAT = 10.0
"""Seconds between two requests for a notice in force."""
FIRST_BACKOFF = 1.0
"""Seconds until a request that failed is repeated; twice as long after each further failure."""
MAX_BACKOFF = 30.0


@dataclass(eq=False, slots=True)
class Standing:
    """A notice in force."""

    source: str
    notice: Notice
    due: float
    """When it is sent next, by the caller's clock."""
    sending: Notice | None = None
    """What is on its way to the coordinator."""
    failures: int = 0
    """Requests in a row that failed."""
    outcome: object = None
    """What the latest request led to; see :meth:`Schedule.answered`."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What a report of a source changed."""

    new: list[Notice] = field(default_factory=list)
    changed: list[Notice] = field(default_factory=list)
    """Notices with another reason, deadline or effect than before."""
    withdrawn: list[Notice] = field(default_factory=list)


class Schedule:
    """The notices in force by source, and when they are due."""

    def __init__(self) -> None:
        self._standing: dict[str, dict[str, Standing]] = {}

    def report(self, source: str, notices: Iterable[Notice], now: float) -> Changes:
        """Take the notices of a source that are in force; those that are absent were withdrawn.

        Args:
            source: its name.
            notices: all of them. If several have one id, the last one counts.
            now: seconds of the caller's clock, which never goes back.

        Returns:
            What is different from the report before.
        """
        before = self._standing.get(source, {})
        after: dict[str, Standing] = {}
        changes = Changes()
        for notice in {one.id: one for one in notices}.values():
            known = before.get(notice.id)
            if known is None:
                known = Standing(source, notice, due=now)
                changes.new.append(notice)
            elif known.notice != notice:
                known.notice, known.due, known.failures, known.outcome = notice, now, 0, None
                changes.changed.append(notice)
            after[notice.id] = known
        changes.withdrawn.extend(one.notice for id_, one in before.items() if id_ not in after)
        self._standing[source] = after
        return changes

    def in_force(self, source: str) -> int:
        """Return how many notices of a source are in force."""
        return len(self._standing.get(source, {}))

    def next_due(self) -> float | None:
        """Return when the next notice is due; None: there is nothing to wait for."""
        return min((one.due for one in self._all() if one.sending is None), default=None)

    def begin_due(self, now: float) -> list[Standing]:
        """Return the notices that are due, and note that they are being sent."""
        due = [one for one in self._all() if one.sending is None and one.due <= now]
        for one in due:
            one.sending = one.notice
        return due

    def answered(self, standing: Standing, outcome: object, now: float) -> bool:
        """Note that the coordinator answered.

        Args:
            standing: from :meth:`begin_due`.
            outcome: what the request led to; compared with that of the request before.
            now: seconds.

        Returns:
            Whether the outcome is news.
        """
        return self._ended(standing, outcome, now, failures=0, pause=REPEAT)

    def failed(self, standing: Standing, why: object, now: float) -> bool:
        """Note that a request failed; the notice is sent again after a pause.

        Args:
            standing: from :meth:`begin_due`.
            why: compared with the outcome of the request before.
            now: seconds.

        Returns:
            Whether the failure is news.
        """
        failures = standing.failures + 1
        pause = min(FIRST_BACKOFF * 2 ** min(standing.failures, 10), MAX_BACKOFF)
        return self._ended(standing, why, now, failures, pause)

    def _ended(self, standing: Standing, outcome: object, now: float, failures: int, pause: float) -> bool:
        sent, standing.sending = standing.sending, None
        if sent != standing.notice:
            return True  # The notice has changed meanwhile, and is due.
        standing.failures, standing.due = failures, now + pause
        news, standing.outcome = standing.outcome != outcome, outcome
        return news

    def _all(self) -> Iterable[Standing]:
        return (one for notices in self._standing.values() for one in notices.values())
