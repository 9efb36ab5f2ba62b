"""What the watcher asks of a source of notices."""

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from muster.watcher.notice import Notice

Report: TypeAlias = Callable[[Iterable[Notice]], None]
"""Receives all notices of one source that are in force now. A notice that is absent was withdrawn."""


class Source(Protocol):
    """One source of notices about this node."""

    name: str
    """As in ``muster watch --source NAME``."""

    async def watch(self, report: Report) -> None:
        """Report the notices in force, at first and after each change, until cancelled.

        A source repeats what fails for a time, and logs it. It raises nothing for that.

        Args:
            report: receives the notices.

        Raises:
            SourceError: the source cannot work here at all, such as for want of permissions.
        """
        ...


class SourceError(Exception):
    """A source cannot work here. The message names the reason and the next step."""
