"""Answers evictions by the EvictionRequest API: a pod goes once its run has saved.

Kubernetes waits for the responder of an eviction as long as heartbeats come. The watcher sends one only after
an answer of the coordinator. So without a coordinator, Kubernetes goes on by itself, after 20 min.
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
from muster.watcher.kubernetes.evictions import Eviction, Progress, answer_of, path_of, progress_of
from muster.watcher.notice import Notice
from muster.watcher.polling import Fault

INTERVAL = 5.0
"""Seconds between two looks at the active evictions."""
PAUSE = 20.0
"""Seconds between two heartbeats at least, as Kubernetes asks for (``ResponderStatus.heartbeatTime``)."""
HEARTBEAT = 60.0
"""Seconds between two heartbeats if nothing has changed."""
MANAGER = "muster-watcher"
"""The name of the watcher as a manager of fields."""


class Applies(Protocol):
    """What the responder needs of the API; see ``Api``."""

    async def apply(self, path: str, manifest: Manifest, manager: str) -> Manifest:
        """See ``Api.apply``."""
        ...


@dataclass(frozen=True, slots=True)
class _Told:
    progress: Progress
    at: float
    """On the monotonic clock."""


class Responder:
    """Answers the evictions in which it is Muster's turn.

    Args:
        api: the API server.
        drain: asks for a save, and tells how far it has come.
        active: returns these evictions, each with its notice.
        clock: seconds of a monotonic clock.
        wall_clock: seconds since 1970.
        pause: waits for so many seconds.
    """

    def __init__(
        self,
        api: Applies,
        drain: Drain,
        active: Callable[[], Iterable[tuple[Eviction, Notice]]],
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._drain = drain
        self._active = active
        self._clock = clock
        self._wall_clock = wall_clock
        self._pause = pause
        self._fault = Fault("evictions")
        self._told: dict[str, _Told] = {}
        """By the uid of an eviction."""

    async def run(self) -> None:
        """Answer until cancelled."""
        while True:
            await self.once()
            await self._pause(INTERVAL)

    async def once(self) -> None:
        """Answer each active eviction for which something is new, or a heartbeat is due."""
        active = list(self._active())
        uids = {eviction.uid for eviction, _ in active}
        self._told = {uid: told for uid, told in self._told.items() if uid in uids}
        failures = []
        for eviction, notice in active:
            try:
                await self._answer(eviction, notice)
            except (KubernetesError, CoordinatorError) as error:
                failures.append(f"{eviction.namespace}/{eviction.name}: {error}")
        if failures:
            self._fault.happened("; ".join(failures))
        else:
            self._fault.over()

    async def _answer(self, eviction: Eviction, notice: Notice) -> None:
        told = self._told.get(eviction.uid)
        if told is not None and told.progress.is_over:
            return  # The watch does not show it yet.
        progress = progress_of(await self._drain(notice))
        now = self._clock()
        if told is not None and not progress.is_over:
            pause = HEARTBEAT if progress == told.progress else PAUSE
            if now < told.at + pause:
                return
        at = datetime.fromtimestamp(self._wall_clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        await self._api.apply(path_of(eviction), answer_of(eviction, progress, at), MANAGER)
        self._told[eviction.uid] = _Told(progress, now)
