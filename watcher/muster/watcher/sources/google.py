"""Google Compute Engine: preemption and host maintenance, by the metadata server."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from muster.watcher.notice import Notice
from muster.watcher.polling import LookError
from muster.watcher.source import SourceError
from muster.watcher.sources.metadata import NOT_FOUND, OK, Answer, MetadataServer
from muster.watcher.sources.reading import LEAD, Parts, document, mapping, printable, text, utc, when

BASE = "http://169.254.169.254"
"""Its name is metadata.google.internal; the address needs no resolver."""
INTERVAL = 2.0
"""Seconds between looks: a preempted VM has 30 s."""
PREEMPTION_SECONDS = 30.0
"""From the preemption until Compute Engine stops the VM."""
PREFIX = "/computeMetadata/v1/instance"
FLAVOR = "Google"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PREEMPTED = {"TRUE": True, "FALSE": False}
TERMINATES = "TERMINATE_ON_HOST_MAINTENANCE"
MIGRATES = "MIGRATE_ON_HOST_MAINTENANCE"

Parse: TypeAlias = Callable[[str, str, str, float], list[Notice]]


def preemption(value: str, node: str, boot: str, since: float) -> list[Notice]:
    """Return the notice in ``instance/preempted``.

    Args:
        value: ``TRUE`` or ``FALSE``.
        node: the node's name.
        boot: names the VM's life since it started; the next one may be preempted again.
        since: when it was first seen, in seconds since 1970.

    Raises:
        LookError: it is another value.
    """
    if value not in PREEMPTED:
        raise LookError(f"instance/preempted is neither TRUE nor FALSE: {printable(value, 80)!r}.")
    if not PREEMPTED[value]:
        return []
    reason = f"Google preempts the VM {node}"
    deadline = since + PREEMPTION_SECONDS
    return [Notice(id=f"google/preempted/{node}/{boot}", reason=reason, stop=True, deadline=deadline)]


def maintenance(value: str, node: str, boot: str, since: float) -> list[Notice]:
    """Return the notice in ``instance/maintenance-event``; as for ``preemption``.

    Compute Engine stops a VM with GPUs or TPUs: it says ``TERMINATE_ON_HOST_MAINTENANCE``. It moves others to
    another host while they run. A restarted watcher gives a move the same id within the hour: nothing in the
    metadata tells one move from the next.
    """
    if value == "NONE":
        return []
    if value == TERMINATES:
        reason = f"Google stops the VM {node} for maintenance of its host"
        return [Notice(id=f"google/maintenance/{node}/{boot}", reason=reason, stop=True)]
    if value == MIGRATES:
        reason = f"Google moves the VM {node} to another host"
        hour = utc(since // 3600 * 3600)
        return [Notice(id=f"google/migration/{node}/{boot}/{hour}", reason=reason, stop=False)]
    raise LookError(f"instance/maintenance-event has an unknown value: {printable(value, 80)!r}.")


def upcoming(found: object, node: str, now: float, lead: float = LEAD) -> list[Notice]:
    """Return the notice in ``instance/upcoming-maintenance`` of a VM that host maintenance stops.

    Args:
        found: the document. There is no maintenance if it is ``NONE``, empty, or says that nothing has been
            received yet.
        node: the node's name.
        now: seconds since 1970.
        lead: seconds before the window opens at which it becomes a notice.

    Raises:
        LookError: it has another shape.
    """
    source = "instance/upcoming-maintenance"
    if found == "NONE":
        return []
    fields = mapping(found, source)
    if not fields or "error" in fields:
        return []
    begins = when(text(fields, "window_start_time", source), now, source)
    if begins - now > lead:
        return []
    if "window_end_time" in fields and when(text(fields, "window_end_time", source), now, source) < now:
        return []
    reason = f"Google schedules maintenance of the host of {node}"
    return [Notice(id=f"google/upcoming/{node}/{utc(begins)}", reason=reason, stop=True, deadline=begins)]


class Google:
    """Reads the metadata of a Compute Engine VM.

    It polls. A request that waits for a change would need one connection for each value, and a metadata
    server that hangs could not be told from one that waits.

    Args:
        node: the node's name.
        base: the metadata server's address.
        lead: seconds before scheduled maintenance at which it becomes a notice.
        clock: seconds since 1970.
        boot: names the VM's life since it started; default: the kernel's name of it.

    Raises:
        SourceError: the kernel's name cannot be read.
    """

    def __init__(
        self,
        node: str,
        *,
        base: str = BASE,
        lead: float = LEAD,
        clock: Callable[[], float] = time.time,
        boot: str | None = None,
    ) -> None:
        self._node = node
        self._server = MetadataServer(base)
        self._lead = lead
        self._clock = clock
        self._boot = boot or _boot_id()
        self._since: dict[str, float] = {}
        parts = Parts((self._preemption, self._maintenance, self._upcoming))
        self.look = parts.look
        """Return the notices in force; raises ``LookError``."""

    async def _preemption(self) -> list[Notice]:
        return await self._in_force("/preempted", preemption)

    async def _maintenance(self) -> list[Notice]:
        return await self._in_force("/maintenance-event", maintenance)

    async def _in_force(self, path: str, parse: Parse) -> list[Notice]:
        """Return the notice in a value, dated when the value was first seen."""
        value, now = await self._value(path), self._clock()
        if not parse(value, self._node, self._boot, now):
            self._since.pop(path, None)
            return []
        return parse(value, self._node, self._boot, self._since.setdefault(path, now))

    async def _upcoming(self) -> list[Notice]:
        answer = await self._get("/upcoming-maintenance?alt=json")
        # Not every type of machine has it. Some answer with an error as long as there was none.
        if answer.status == NOT_FOUND or (answer.status >= 500 and b"no notifications" in answer.body):
            return []
        if not answer.found():
            return []
        found = upcoming(document(answer.body, answer.url), self._node, self._clock(), self._lead)
        # A VM that moves to another host hears of that by its maintenance event.
        if found and await self._value("/scheduling/on-host-maintenance") == "MIGRATE":
            return []
        return found

    async def _value(self, path: str) -> str:
        answer = await self._get(path)
        if answer.status != OK:
            raise LookError(f"{answer.url} answers {answer.status}.")
        return answer.body.decode(errors="replace").strip()

    async def _get(self, path: str) -> Answer:
        answer = await self._server.get(PREFIX + path, {"Metadata-Flavor": FLAVOR})
        if answer.status == OK and answer.flavor != FLAVOR:
            raise LookError(
                f"{answer.url} is not Google's metadata server: its answer lacks Metadata-Flavor."
            )
        return answer


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError as error:
        raise SourceError(
            f"source google cannot read {BOOT_ID}: {error.strerror}. It needs this file to tell one "
            "preemption from the next. Let the watcher read it."
        ) from error
