"""What a process says to the coordinator in its session, and what follows from the answers.

It has no threads and no connection: :mod:`muster.worker.session.session` has them. What is still open is sent
again on each stream, which is always safe.
"""

import logging
import os
import uuid
from dataclasses import dataclass, field

from google.rpc.error_details_pb2 import ErrorInfo

from muster.client.calls import ELSEWHERE
from muster.client.protocol import PROTOCOL_VERSION
from muster.v1 import session_pb2 as pb
from muster.worker.closed import Closed, closed_from_pb
from muster.worker.decision import decision_from_pb
from muster.worker.errors import MusterError, RefusedError
from muster.worker.groups.group import Group
from muster.worker.groups.pending import Pending
from muster.worker.session.age import age
from muster.worker.session.save_request import SaveAsked, asked_from_pb
from muster.worker.version import VERSION

logger = logging.getLogger("muster.worker.session.session")  # As users know it.


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """The process, and its coordinator. Sessions with equal configs are one session."""

    endpoint: str
    run_id: str
    generation: int
    rank: int
    host: str
    node_rank: int | None = None
    node_name: str = field(default="", compare=False)
    """As the scheduler knows it; empty: the same as ``host``."""


class SessionDialogue:
    """The state of one session, on whatever stream.

    Args:
        config: the process, and its coordinator.

    Attributes:
        groups: those that the process has joined or is joining, by prefix.
        fatal: why the session is over; None while it is not.
        max_payload_bytes: what the coordinator accepts from one rank; None: it has not said.
        closed: how the run was closed; None while it is open.
        save_asked: the save that all ranks were asked for last.
        closing: whether the process says goodbye, or has done so.
        process: what the coordinator knows of this process.
        goodbye_settled: whether the coordinator has received the goodbye, or does not know this process.
    """

    def __init__(self, config: SessionConfig) -> None:
        self.config = config
        self.groups: dict[str, Group] = {}
        self.fatal: MusterError | None = None
        self.max_payload_bytes: int | None = None
        self.closed: Closed | None = None
        self.save_asked: SaveAsked | None = None
        self.closing = False
        self.goodbye_settled = False
        self._reason = ""
        self.process = pb.Process(
            rank=config.rank,
            incarnation=uuid.uuid4().hex,
            host=config.host,
            node_name=config.node_name if config.node_name != config.host else "",
            pid=os.getpid(),
            node_rank=config.node_rank,
        )

    @property
    def done(self) -> bool:
        """Whether there is nothing left to say or to hear."""
        return self.fatal is not None and (self.goodbye_settled or not self.closing)

    @property
    def was_welcomed(self) -> bool:
        """Whether the coordinator has ever welcomed this process."""
        return self.process.ordinal > 0

    # ------------------------------------------------------------------ what the process says

    def hello(self) -> pb.ConnectRequest:
        """Return the first message of a stream."""
        self.process.age_ms = int(age() * 1000)
        return pb.ConnectRequest(
            hello=pb.Hello(
                run_id=self.config.run_id,
                generation=self.config.generation,
                processes=[self.process],
                sdk_version=VERSION,
                protocol_version=PROTOCOL_VERSION,
            )
        )

    def recognized(self, welcome: pb.Welcome) -> None:
        """Note this process's number among its rank's."""
        self.process.ordinal = welcome.ordinals[0]

    def welcomed(self, welcome: pb.Welcome) -> list[pb.ConnectRequest]:
        """Return all messages that are still open: the process may send them now."""
        self.recognized(welcome)
        self.max_payload_bytes = welcome.max_payload_bytes
        if self.closing:
            return [self.goodbye()]
        messages = []
        for group in self.groups.values():
            messages.append(group.join_request())
            if group.pending is not None:
                messages.append(group.pending.message())
        return messages

    def goodbye(self) -> pb.ConnectRequest:
        """Return the last message of a session."""
        return pb.ConnectRequest(goodbye=pb.Goodbye(reason=self._reason))

    def close(self, reason: str, *, connected: bool) -> None:
        """End the session. A process that was never welcomed, and is not connected, owes no goodbye."""
        self.closing = True
        self._reason = reason
        self.goodbye_settled = not connected and not self.was_welcomed
        self.fatal = self.fatal or MusterError("the session of this process is closed.")

    # ------------------------------------------------------------------ what it hears

    def handle(self, response: pb.ConnectResponse, now: float) -> None:
        """Handle a message other than a welcome, an inspection, or the notice of a drain.

        Args:
            response: the message.
            now: seconds on the monotonic clock.
        """
        kind = response.WhichOneof("message")
        if kind == "decision":
            decision = response.decision
            if pending := self._pending(decision.prefix, decision.sequence):
                pending.result = decision_from_pb(decision)
        elif kind == "group_joined":
            group = self.groups.get(response.group_joined.prefix)
            if group is not None and group.position is None:
                group.position = response.group_joined.positions[0].sequence
        elif kind == "progress":
            progress = response.progress
            if pending := self._pending(progress.prefix, progress.sequence):
                logger.warning("%s", pending.warning(progress.message))
        elif kind == "closed":
            closed = closed_from_pb(response.closed)
            if self.closed is None:
                logger.warning("run %s was closed by %s; barriers go on", self.config.run_id, closed)
            self.closed = closed
        elif kind == "save_asked":
            self.save_asked = asked_from_pb(response.save_asked, now).after(self.save_asked, now)
        elif kind == "refusal":
            self._refused(response.refusal)

    def _refused(self, refusal: pb.Refusal) -> None:
        info = ErrorInfo()
        refusal.error_info.Unpack(info)
        error = RefusedError(refusal.message, info.reason)
        group = self.groups.get(refusal.prefix)
        if not refusal.prefix or group is None:
            if not self._is_transient(info.reason):
                self.fatal = error
        elif refusal.HasField("sequence"):
            if pending := self._pending(refusal.prefix, refusal.sequence):
                pending.result = error
                group.go_on_after(info.reason, info.metadata)
        else:
            group.error = error
            if group.pending is not None:
                group.pending.result = error

    def _is_transient(self, reason: str) -> bool:
        """Return whether a refused Hello may be sent again.

        The incarnation is this session's alone, so a session that replaced it began with its own late Hello.
        A process that returns finds room when the coordinator has seen its old streams end.
        """
        transient = reason == "SESSION_REPLACED" or reason in ELSEWHERE
        return transient or (reason == "LIMIT_EXCEEDED" and self.was_welcomed)

    def _pending(self, prefix: str, sequence: int) -> Pending | None:
        group = self.groups.get(prefix)
        pending = group.pending if group is not None else None
        return pending if pending is not None and pending.request.sequence == sequence else None
