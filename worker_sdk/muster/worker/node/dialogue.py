"""What a node says to the coordinator to get a place in a round, and what follows from the answers.

It has no threads, no clock and no connection: :mod:`muster.worker.node.membership` has them.
"""

import logging
import os
import uuid
from dataclasses import dataclass

from muster.client.protocol import PROTOCOL_VERSION
from muster.v1 import rendezvous_pb2 as pb
from muster.worker.closed import Closed, closed_from_pb
from muster.worker.errors import MusterError, RefusedError
from muster.worker.stopped import Stopped, stopped_from_pb
from muster.worker.version import VERSION

logger = logging.getLogger(__name__)

TRANSIENT = frozenset({"SESSION_REPLACED", "SLOW_CONSUMER"})
"""Reasons to open another stream: the node still has its place."""
FORGOTTEN = "RUN_FORGOTTEN"
"""The reason of a run that an operator has removed. A node that joins again starts another run."""
STOPPED = "RUN_STOPPED"
"""The reason of a run that was stopped, to be resumed by other agents."""
EVICTED = "NODE_EVICTED"
"""The reason of a node that an operator has sent away for good."""
CLOSING = frozenset({"RUN_CLOSED", "NODE_NOT_NEEDED", FORGOTTEN})
"""Reasons that say that the run is over."""
PLACE_LOST = CLOSING | {STOPPED, EVICTED, "NODE_REMOVED", "SUPERSEDED"}
"""The only reasons by which a node of a complete round loses its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """The node, its run, and the terms on which it joins; times in seconds."""

    endpoint: str
    run_id: str
    address: str
    min_nodes: int
    max_nodes: int
    join_timeout: float
    last_call_timeout: float
    keep_alive_timeout: float
    connect_timeout: float
    """Limit for the first contact with the coordinator."""
    call_timeout: float
    """Limit for leaving."""
    name: str = ""
    """The machine's, as the scheduler knows it; empty: the same as ``address``."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node's rank in a round."""

    round: int
    rank: int
    world_size: int


class JoinDialogue:
    """One agent's attempts to join rounds, one after the other.

    Args:
        config: the node, and the terms on which it joins.

    Attributes:
        place: the node's rank in the present round; None while it has none.
        error: why the attempt has ended; None while it goes on.
        waiting: the number of nodes that wait to be let in.
        lost: the number of nodes that the round has lost, if the next round can form without them.
        fenced: whether the coordinator has removed the node from its round.
        stands_by: whether the node waits for a place to become free.
        waits_since: when a coordinator started to count this attempt's join timeout; None while none does.
        closed: how the run was closed; None while the node knows of no closing.
        stopped: how the run was stopped; None while the node knows of no stop.
        evicted_at: when it heard that it was evicted, on the clock of ``waits_since``; None: it has not.
        nodes_gone: how many nodes of a stopped round have gone.
        met: whether the coordinator has ever answered.
        admitted: whether it has answered in this attempt.
    """

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        name = config.name if config.name != config.address else ""
        self.node = pb.Node(incarnation=uuid.uuid4().hex, address=config.address, pid=os.getpid(), name=name)
        self.attempt = 0
        self.closed: Closed | None = None
        self.stopped: Stopped | None = None
        self.evicted_at: float | None = None
        self.met = False
        self._reset()

    def _reset(self) -> None:
        self.place: Place | None = None
        self.error: MusterError | None = None
        self.waiting = 0
        self.lost = 0
        self.nodes_gone = 0
        self.fenced = False
        self.stands_by = False
        self.waits_since: float | None = None
        self.admitted = False

    def join(self) -> None:
        """Start another attempt, and give the present place up with it."""
        self.attempt += 1
        self._reset()

    def leave(self) -> bool:
        """End the attempt. Return whether the coordinator has to be told."""
        has_place = self.attempt > 0 and not self.done
        self.error = self.error or MusterError("this node has left the rendezvous.")
        return has_place and self.met

    @property
    def done(self) -> bool:
        """Whether the attempt has ended."""
        return self.error is not None or self.fenced

    @property
    def knows_stopped(self) -> bool:
        """Whether the node was told that the run was stopped."""
        refused = isinstance(self.error, RefusedError) and self.error.reason == STOPPED
        return self.stopped is not None or refused

    @property
    def knows_closed(self) -> bool | None:
        """Whether the run is closed; None if the node has no place, so that nobody tells it."""
        if self.closed is not None:
            return True
        if isinstance(self.error, RefusedError) and self.error.reason in CLOSING:
            return True
        return False if self.met and not self.done else None

    def request(self, now: float) -> pb.JoinRequest:
        """Return the message that opens a stream.

        Args:
            now: on the clock of ``waits_since``.
        """
        config, since = self.config, self.waits_since
        return pb.JoinRequest(
            run_id=config.run_id,
            node=self.node,
            attempt=self.attempt,
            round=self.place.round if self.place is not None else None,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            join_timeout_ms=round(config.join_timeout * 1000),
            last_call_timeout_ms=round(config.last_call_timeout * 1000),
            keep_alive_timeout_ms=round(config.keep_alive_timeout * 1000),
            sdk_version=VERSION,
            protocol_version=PROTOCOL_VERSION,
            waited_ms=round((now - since) * 1000) if since is not None else 0,
        )

    def handle(self, response: pb.JoinResponse, now: float) -> None:
        """Handle a message.

        Args:
            response: the message.
            now: on the clock of ``waits_since``.
        """
        self.met = self.admitted = True
        kind = response.WhichOneof("message")
        if kind == "round_complete":
            complete = response.round_complete
            self.stands_by, self.waits_since = False, None
            self.place = Place(complete.round, complete.rank, complete.world_size)
        elif kind == "standing":
            self.stands_by = response.standing.standing == pb.NODE_STANDING_REDUNDANT
            # A node may stand by without end.
            self.waits_since = None if self.stands_by else self.waits_since or now
            logger.info("%s", response.standing.message)
        elif kind == "nodes_waiting":
            self.waiting, self.lost = response.nodes_waiting.count, response.nodes_waiting.lost
        elif kind == "stopped":
            if self.stopped is None:
                self.stopped = stopped_from_pb(response.stopped.stopped)
                logger.info("run %s was %s", self.config.run_id, self.stopped)
            self.nodes_gone = response.stopped.nodes_gone
            # A stopped round ends by itself: its agents do not restart their workers.
            self.waiting = self.lost = 0
        elif kind == "closed":
            self.closed = closed_from_pb(response.closed)
            logger.info("run %s was closed by %s", self.config.run_id, self.closed)

    def is_transient(self, reason: str) -> bool:
        """Return whether to open another stream after a refusal, whatever the process's token."""
        if self.place is not None:
            return reason not in PLACE_LOST
        # A node that returns finds room when the coordinator has seen its old streams end.
        return reason in TRANSIENT or (reason == "LIMIT_EXCEEDED" and self.met)

    def refused(self, error: RefusedError, now: float) -> None:
        """Handle a refusal that ends the attempt.

        Args:
            error: the refusal.
            now: on the clock of ``waits_since``.
        """
        self.met = True
        if error.reason == EVICTED:
            self.evicted_at = now
            logger.warning("%s", error)
        if error.reason == "RUN_CLOSED" and self.stands_by:
            # The coordinator was restarted, and does not know any more that this node stood by.
            error = RefusedError(str(error), "NODE_NOT_NEEDED")
        if self.place is not None and error.reason == "NODE_REMOVED":
            # The agent sees a node that waits, and joins again: this one, as a newcomer.
            self.fenced = True
            self.node.incarnation = uuid.uuid4().hex
            logger.warning("%s", error)
        else:
            self.error = error
