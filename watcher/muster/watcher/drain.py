"""Asks the coordinator to save the runs on this node."""

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from muster.v1 import run_pb2 as pb
from muster.watcher.connection import Connection
from muster.watcher.notice import Notice

MAX_NAME_BYTES = 256
"""Bytes of an id or a name that a coordinator accepts by default."""
MAX_REASON = 1_000
"""Characters of a reason."""
MAX_DEADLINE = 30 * 86_400.0
"""Seconds of a deadline that a coordinator accepts. A later one is sent as this one, and comes nearer."""


class Drain(Protocol):
    """Sends a notice to the coordinator."""

    async def __call__(self, notice: Notice) -> Sequence[pb.DrainedRun]:
        """Send a notice.

        Returns:
            The runs that have a process or an agent on this node.

        Raises:
            CoordinatorError: the coordinator refused it, or did not answer.
        """
        ...


class NodeDrain:
    """Calls ``DrainNode`` for one node.

    Args:
        connection: to the coordinator.
        node_name: the node, as its scheduler knows it.
        by: the caller, for people.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self, connection: Connection, node_name: str, by: str, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._connection = connection
        self._node_name = node_name
        self._by = by
        self._wall_clock = wall_clock

    async def __call__(self, notice: Notice) -> Sequence[pb.DrainedRun]:
        """See :class:`Drain`."""

        async def make(stub: Any, left: float, metadata: Any) -> pb.DrainNodeResponse:  # noqa: ANN401
            # A new request for each attempt, since the search for the leader uses up the time left.
            request = request_of(notice, self._node_name, self._by, self._wall_clock())
            response: pb.DrainNodeResponse = await stub.DrainNode(request, timeout=left, metadata=metadata)
            return response

        return (await self._connection.call(make)).runs


def request_of(notice: Notice, node_name: str, by: str, now: float) -> pb.DrainNodeRequest:
    """Return the request for a notice.

    Args:
        notice: the notice.
        node_name: the watcher's own node.
        by: the caller, for people.
        now: seconds since 1970.
    """
    deadline_ms = 0
    if notice.deadline is not None:
        # 0 would mean that there is no deadline.
        deadline_ms = max(1, int(min(notice.deadline - now, MAX_DEADLINE) * 1000))
    return pb.DrainNodeRequest(
        node_name=notice.node or node_name,
        stop=notice.stop,
        by=short_name(by),
        reason=printable(notice.reason)[:MAX_REASON],
        deadline_ms=deadline_ms,
        notice_id=short_name(notice.id),
        run_id=short_name(notice.run_id),
    )


def printable(text: str) -> str:
    """Return a text with ``?`` for each character that no name may have."""
    return "".join(one if one.isprintable() else "?" for one in text)


def short_name(text: str) -> str:
    """Return a name that a coordinator accepts: another name if the text is too long for one.

    The same text has the same name.
    """
    name = printable(text)
    if len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:32]
    start = name.encode("utf-8", "replace")[: MAX_NAME_BYTES - len(digest) - 1].decode("utf-8", "ignore")
    return f"{start}-{digest}"
