"""The log of a watcher."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import structlog

from muster.v1 import run_pb2 as pb
from muster.watcher.connection import CoordinatorError
from muster.watcher.notice import Notice


class WatcherLog:
    """Logs one line for each notice, and for each answer of the coordinator that is news."""

    def __init__(self) -> None:
        self._log: Any = structlog.get_logger()

    def began(self, source: str, notice: Notice) -> None:
        """See ``Observer``."""
        self._log.warning("notice.began", source=source, **_fields(notice))

    def changed(self, source: str, notice: Notice) -> None:
        """See ``Observer``."""
        self._log.warning("notice.changed", source=source, **_fields(notice))

    def withdrawn(self, source: str, notice: Notice) -> None:
        """See ``Observer``."""
        self._log.info("notice.withdrawn", source=source, notice=notice.id)

    def answered(self, notice: Notice, runs: Sequence[pb.DrainedRun]) -> None:
        """See ``Observer``."""
        saves = [
            f"{run.run_id} (save {run.save.number}{', asked before' if run.was_asked else ''})"
            for run in runs
        ]
        reason = f"asked to save: {', '.join(saves)}" if saves else "no run is on the node"
        self._log.info("notice.answered", notice=notice.id, reason=reason)

    def failed(self, notice: Notice, error: CoordinatorError) -> None:
        """See ``Observer``."""
        self._log.error("notice.failed", notice=notice.id, reason=str(error))


def _fields(notice: Notice) -> dict[str, object]:
    fields: dict[str, object] = {"notice": notice.id, "stop": notice.stop, "reason": notice.reason}
    if notice.deadline is not None:
        fields["deadline"] = datetime.fromtimestamp(notice.deadline, UTC).isoformat()
    return fields
