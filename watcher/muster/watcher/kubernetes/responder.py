"""Answers evictions by the EvictionRequest API: Kubernetes evicts a pod once its run has saved.

Kubernetes waits for the responder of an eviction as long as heartbeats come. The watcher sends one only after
an answer of the coordinator, and for ``MAX_WAIT`` seconds at most. So a drain of a node ends also if the
coordinator is away, or if ranks never save.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from muster.watcher.connection import CoordinatorError
from muster.watcher.drain import Drain
from muster.watcher.kubernetes.api import KubernetesError, Manifest
from muster.watcher.kubernetes.evictions import KubernetesEviction, answer_of, path_of, progress_of
from muster.watcher.notice import Notice
from muster.watcher.polling import Fault

POLL_INTERVAL = 5.0
"""Seconds between two looks at the active evictions."""
MIN_HEARTBEAT_INTERVAL = 20.0
"""Seconds between two heartbeats at least (KEP-4563, ``ResponderStatus.heartbeatTime``)."""
HEARTBEAT_INTERVAL = 300.0
"""Seconds between two heartbeats if nothing has changed. Each one goes to all watchers of the namespace, and
Kubernetes waits 20 min for the next."""
FINAL_AFTER = 30.0
"""Seconds for which no save must be pending, before Kubernetes may evict the pod. While the ranks of a run
reconnect, or its nodes meet for a round, it is not on the node. And ranks that have saved need time to
end."""
MAX_WAIT = 1800.0
"""Seconds after which Kubernetes may evict the pod in any case."""
FIELD_MANAGER = "muster-watcher"


class Applies(Protocol):
    """What the responder needs of the API; see ``Api``."""

    async def apply(self, path: str, manifest: Manifest, manager: str) -> Manifest:
        """See ``Api.apply``."""
        ...


@dataclass(slots=True)
class _Report:
    """What was reported of one eviction. Times are of the monotonic clock."""

    began: float
    """When the watcher saw the eviction first."""
    message: str = ""
    """The message that Kubernetes has; empty: none."""
    at: float = 0.0
    """When it was sent."""
    final_since: float | None = None
    """Since when no save is pending; None: one is."""
    is_completed: bool = False


class Responder:
    """Answers the evictions that wait for Muster.

    Args:
        api: the API server.
        drain: asks for a save, and tells how far it has come.
        active: returns these evictions, each with its notice.
        clock: seconds of a monotonic clock.
        wall_clock: seconds since 1970.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        api: Applies,
        drain: Drain,
        active: Callable[[], Iterable[tuple[KubernetesEviction, Notice]]],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._drain = drain
        self._active = active
        self._clock = clock
        self._wall_clock = wall_clock
        self._sleep = sleep
        self._fault = Fault("kubernetes (evictions)")
        self._reports: dict[str, _Report] = {}
        """By the uid of an eviction."""

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            await self.once()
            await self._sleep(POLL_INTERVAL)

    async def once(self) -> None:
        """Answer each active eviction of which something is new, or for which a heartbeat is due."""
        found = list(self._active())
        now = self._clock()
        self._reports = {one.uid: self._reports.get(one.uid) or _Report(began=now) for one, _ in found}
        failures = []
        for eviction, notice in found:
            try:
                await self._answer(eviction, notice, self._reports[eviction.uid])
            except (KubernetesError, CoordinatorError) as error:
                failures.append(f"{eviction.namespace}/{eviction.name}: {error}")
        if failures:
            self._fault.happened("; ".join(failures))
        else:
            self._fault.over()

    async def _answer(self, eviction: KubernetesEviction, notice: Notice, report: _Report) -> None:
        if report.is_completed:
            return  # The watch does not show it yet.
        progress = progress_of(await self._drain(notice))
        now, message = self._clock(), progress.message
        if not progress.is_final:
            report.final_since = None
        elif report.final_since is None:
            report.final_since = now
        completes = report.final_since is not None and now >= report.final_since + FINAL_AFTER
        if not completes and now >= report.began + MAX_WAIT:
            completes, message = True, f"not saved within {MAX_WAIT:.0f} s: {message}"
        interval = HEARTBEAT_INTERVAL if message == report.message else MIN_HEARTBEAT_INTERVAL
        if report.message and not completes and now < report.at + interval:
            return
        at = datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        manifest = answer_of(eviction, message, at, completes=completes)
        await self._api.apply(path_of(eviction), manifest, FIELD_MANAGER)
        report.message, report.at, report.is_completed = message, now, completes
