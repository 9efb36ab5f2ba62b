"""Checks of names, ranks, times and shapes against the bounds, before anything is changed."""

from collections.abc import Sequence

from muster.client.protocol import MAX_STEP, MAX_WRITE_BYTES, MAX_WRITE_SECONDS
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.events import (
    ArriveOnce,
    DrainNode,
    JoinGroup,
    JoinRendezvous,
    ProcessInfo,
    RequestSave,
    WriteReport,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import ALL_RANKS, Ranks, Shape
from muster.service.core.vocabulary.operations import Change, Operation, Waiting
from muster.service.core.vocabulary.refusal import Reason, Refusal

MAX_GENERATION = 2**31 - 1
"""Far beyond any count of restarts, and within every field that a generation or a round is stored in."""


class Checks:
    """Checks of events that do not depend on the state. Each raises ``Refusal``: INVALID_ARGUMENT.

    Args:
        limits: the coordinator's bounds.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def name(self, field: str, value: str) -> None:
        """Check that a name is short and printable."""
        size, most = len(value.encode("utf-8", "replace")), self._limits.max_name_bytes
        if not value:
            raise invalid(field, '""', "it must not be empty")
        if size > most:
            raise invalid(
                field,
                f'"{report.printable(value[:20])}…"',
                f"it has {size:,} bytes and may have {most}",
            )
        if not value.isprintable():
            raise invalid(field, f'"{report.printable(value)}"', "control characters are not allowed")

    def reason(self, reason: str) -> None:
        """Check the length of a reason."""
        size, most = len(reason.encode("utf-8", "replace")), self._limits.max_reason_bytes
        if size > most:
            raise invalid("reason", f"{size:,} bytes", f"it may have {most:,}")

    def save_request(self, ask: RequestSave | DrainNode) -> None:
        """Check the author, the reason, the deadline and the notice of a request for a save."""
        self.name("by", ask.by)
        self.reason(ask.reason)
        if ask.deadline is not None:
            self.timeout(ask.deadline, "deadline")
        if ask.notice:
            self.name("notice_id", ask.notice)

    def generation(self, generation: int) -> None:
        """Check that a generation fits into every field that stores it."""
        if generation > MAX_GENERATION:
            raise invalid("generation", generation, f"it must be from 0 to {MAX_GENERATION}")

    def timeout(self, timeout: float, field: str = "timeout") -> None:
        """Check that a timeout, in seconds, is positive and bounded."""
        most = self._limits.max_timeout_seconds
        if not 0 < timeout <= most:
            raise invalid(field, f"{timeout:g} s", f"it must be above 0 and at most {most:g} s")

    def write_report(self, report: WriteReport | None) -> None:
        """Check that the numbers of a report fit the fields that store them."""
        if report is None:
            return
        if report.step is not None and report.step > MAX_STEP:
            raise invalid("write.step", report.step, f"it may be {MAX_STEP}")
        if report.bytes is not None and report.bytes > MAX_WRITE_BYTES:
            raise invalid("write.bytes", report.bytes, f"it may be {MAX_WRITE_BYTES}")
        if report.seconds is not None and report.seconds > MAX_WRITE_SECONDS:
            raise invalid("write.write_ms", f"{report.seconds:g} s", f"it may be {MAX_WRITE_SECONDS:g} s")

    def process(self, info: ProcessInfo) -> None:
        """Check the identity of a process."""
        if not 0 <= info.rank < self._limits.max_world_size:
            raise invalid("rank", info.rank, f"it must be from 0 to {self._limits.max_world_size - 1}")
        self.name("incarnation", info.incarnation)
        self.name("host", info.host)
        if info.node_name:
            self.name("node_name", info.node_name)
        if info.pid < 0:
            raise invalid("pid", info.pid, "a process id is not negative")

    def processes(self, infos: Sequence[ProcessInfo]) -> None:
        """Check that a Hello names processes, each of another rank."""
        if not infos:
            raise invalid("processes", "empty", "a Hello names at least one process")
        ranks = {info.rank for info in infos}
        if len(ranks) < len(infos):
            raise invalid("processes", report.ranges(ranks), "a rank may be named only once")
        for info in infos:
            self.process(info)

    def shape(self, event: JoinGroup | ArriveOnce) -> Shape:
        """Check the world size and participants of a group, and return them as a shape."""
        self.name("prefix", event.prefix)
        world_size, participants = event.world_size, Ranks.of(event.participants)
        if len(participants) > self._limits.max_world_size:
            named = f"{len(participants):,} ranks"
            raise invalid("participants", named, f"there may be {self._limits.max_world_size:,}")
        if not 1 <= world_size <= self._limits.max_world_size:
            raise invalid("world_size", world_size, f"it must be from 1 to {self._limits.max_world_size}")
        ordered = participants if participants.is_ascending else Ranks(sorted(participants.members))
        if len(ordered) < len(participants):
            raise invalid("participants", list(participants)[:20], "a rank may be named only once")
        if ordered and not 0 <= ordered[0] <= ordered[-1] < world_size:
            outside = [rank for rank in ordered if not 0 <= rank < world_size]
            raise invalid("participants", outside[:20], f"ranks must be from 0 to {world_size - 1}")
        return Shape(world_size, ALL_RANKS if len(ordered) == world_size else ordered)

    def node(self, event: JoinRendezvous) -> None:
        """Check the identity and settings of a node."""
        self.name("incarnation", event.node.incarnation)
        self.name("address", event.node.address)
        if event.node.name:
            self.name("name", event.node.name)
        if event.node.pid < 0:
            raise invalid("pid", event.node.pid, "a process id is not negative")
        if event.attempt < 1:
            raise invalid("attempt", event.attempt, "attempts are counted from 1")
        settings, most = event.settings, self._limits.max_world_size
        if not 1 <= settings.min_nodes <= most:
            raise invalid("min_nodes", settings.min_nodes, f"it must be from 1 to {most}")
        if not settings.min_nodes <= settings.max_nodes <= most:
            raise invalid(
                "max_nodes",
                settings.max_nodes,
                f"it must be from min_nodes, which is {settings.min_nodes}, to {most}",
            )
        self.timeout(settings.join_timeout, "join_timeout")
        self.timeout(settings.last_call_timeout, "last_call_timeout")
        self.timeout(settings.keep_alive_timeout, "keep_alive_timeout")

    def operation(self, operation: Operation) -> None:
        """Check the client, number and timeout of a store operation."""
        if isinstance(operation, Waiting) and operation.timeout:
            self.timeout(operation.timeout)
        if isinstance(operation, Change) and operation.id is not None:
            self.name("operation.client", operation.id.client)
            if operation.id.number < 1:
                raise invalid("operation.number", operation.id.number, "a client's operations count from 1")


def invalid(field: str, value: object, why: str) -> Refusal:
    """Return the refusal of an invalid value.

    Args:
        field: the field of the message.
        value: its value.
        why: what it must be instead.
    """
    return Refusal(Reason.INVALID_ARGUMENT, f"{field} = {value}: {why}.", field=field)
