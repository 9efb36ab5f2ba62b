"""Microsoft Azure: Scheduled Events of the metadata server."""

import time
from collections.abc import Callable, Mapping

from muster.watcher.notice import Notice
from muster.watcher.polling import LookError
from muster.watcher.sources.metadata import OK, Answer, MetadataServer
from muster.watcher.sources.reading import (
    LEAD,
    NAME,
    document,
    items,
    mapping,
    name,
    printable,
    text,
    when,
)

BASE = "http://169.254.169.254"
INTERVAL = 2.0
"""Seconds between looks: an evicted Spot VM has 30 s."""
FIRST_TIMEOUT = 150.0
"""Seconds for the first answer: Azure enables the events then, which takes up to two minutes."""
TIMEOUT = 10.0
"""Seconds for each later answer."""
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
VM_NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
STOPS = {
    "Preempt": "evicts the Spot VM {node}",
    "Reboot": "reboots the VM {node}",
    "Redeploy": "moves the VM {node} to another host, without its local disks",
    "Terminate": "deletes the VM {node}",
}
PAUSES = {"Freeze": "pauses the VM {node} for some seconds"}
KINDS = STOPS | PAUSES


def scheduled_events(found: object, vm: str, node: str, now: float, lead: float = LEAD) -> list[Notice]:
    """Return the notices in ``scheduledevents``.

    Args:
        found: the document. It also has the events of other VMs, and perhaps of kinds that come later.
        vm: the name that Azure has for this VM.
        node: the node's name.
        now: seconds since 1970.
        lead: seconds before an event's first possible time at which it becomes a notice.

    Raises:
        LookError: it has another shape.
    """
    source = "scheduledevents"
    events = items(mapping(found, source).get("Events"), source)
    notices = (_notice(event, node, now, lead) for event in events if _concerns(event, vm))
    return [notice for notice in notices if notice is not None]


def _concerns(event: Mapping[str, object], vm: str) -> bool:
    resources = event.get("Resources")
    if not isinstance(resources, list) or not all(isinstance(one, str) for one in resources):
        raise LookError("scheduledevents: an event has no list of resources.")
    # Names of resources have no case.
    return vm.casefold() in (one.casefold() for one in resources)


def _notice(event: Mapping[str, object], node: str, now: float, lead: float) -> Notice | None:
    source = "scheduledevents"
    kind = text(event, "EventType", source)
    if kind not in KINDS:
        return None
    begins = event.get("NotBefore")  # Empty once the event has started.
    deadline = when(text(event, "NotBefore", source), now, source) if begins else None
    if deadline is not None and deadline - now > lead:
        return None
    description = event.get("Description")
    reason = f"Azure {KINDS[kind].format(node=node)}"
    if isinstance(description, str) and description:
        reason += f": {printable(description)}"
    return Notice(
        id=f"azure/{kind.lower()}/{node}/{name(event, 'EventId', source)}",
        reason=reason,
        stop=kind in STOPS,
        deadline=deadline if kind in STOPS else None,
    )


class Azure:
    """Reads the Scheduled Events of a VM. It acknowledges none.

    Args:
        node: the node's name.
        base: the metadata server's address.
        lead: seconds before an event at which it becomes a notice.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        node: str,
        *,
        base: str = BASE,
        lead: float = LEAD,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._node = node
        self._server = MetadataServer(base)
        self._lead = lead
        self._clock = clock
        self._vm = ""
        self._enabled = False

    async def look(self) -> list[Notice]:
        """Return the notices in force.

        Raises:
            LookError: the metadata server does not say.
        """
        if not self._vm:
            self._vm = _vm_name(await self._get(VM_NAME, TIMEOUT))
        answer = await self._get(EVENTS, TIMEOUT if self._enabled else FIRST_TIMEOUT)
        self._enabled = True
        found = document(answer.body, answer.url)
        return scheduled_events(found, self._vm, self._node, self._clock(), self._lead)

    async def _get(self, path: str, limit: float) -> Answer:
        answer = await self._server.get(path, {"Metadata": "true"}, limit=limit)
        if answer.status != OK:
            raise LookError(f"{answer.url} answers {answer.status}.")
        return answer


def _vm_name(answer: Answer) -> str:
    found = answer.body.decode(errors="replace").strip()
    if not NAME.fullmatch(found):
        raise LookError(f"{answer.url} gives no name: {printable(found, 80)!r}.")
    return found
