"""A node's membership in the rendezvous of its run.

One thread holds the stream that is the node's place. Joining waits for the coordinator's answer; everything
else reads what the coordinator has pushed. A forked child must not use the parent's membership. The thread
keeps the membership alive, so its owner must end it: :meth:`NodeMembership.leave` or
:meth:`NodeMembership.abandon`.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy

import grpc
from google.protobuf.message import Message

from muster.client.calls import ELSEWHERE, explain, reason_of
from muster.client.credentials import check_credentials
from muster.client.errors import EnvironmentValueError
from muster.client.replicas import Search, Target, replicas_of
from muster.v1 import common_pb2, rendezvous_pb2_grpc
from muster.v1 import rendezvous_pb2 as pb
from muster.worker.closed import closed_from_pb
from muster.worker.errors import ConnectError, MusterError, RefusedError
from muster.worker.node.dialogue import EVICTED, FORGOTTEN, JoinDialogue
from muster.worker.node.dialogue import NodeConfig as NodeConfig
from muster.worker.node.dialogue import Place as Place
from muster.worker.stopped import stopped_from_pb
from muster.worker.transport.channel import open_channel
from muster.worker.transport.fork_guard import GrpcUsage, await_before_fork, check, collect, forked
from muster.worker.transport.stream import ReconnectingStream, StreamSignal
from muster.worker.transport.unary import Method, Response, ask_leader

logger = logging.getLogger(__name__)

USAGE = "a node's place"
"""What this process uses gRPC for."""
HEAD_START = 5.0
"""Seconds that an evicted node leaves its workers running, so that the other agents end theirs first. If its
workers ended first, the others would fail in their collectives, and torchrun would count a failure of each
node. Its workers end anyway in the first collective that the others are not in."""


class NodeMembership:
    """One agent's membership in a rendezvous.

    Args:
        config: the node, and the terms on which it joins.
        on_departure: called on the stream's thread when nodes of a stopped round have gone. It gets the place
            of this node and their number, and must not wait.

    Raises:
        EnvironmentValueError: the token or a certificate cannot be used.
        MusterError: this process was forked from one that uses gRPC.
    """

    def __init__(self, config: NodeConfig, on_departure: Callable[[Place, int], None] | None = None) -> None:
        check_credentials(config.endpoint)
        check()
        self.config = config
        self._dialogue = JoinDialogue(config)
        self._on_departure = on_departure
        self._owner = os.getpid()
        self._changed = threading.Condition()
        """Guards the dialogue."""
        self._stream = ReconnectingStream(self, config.endpoint, USAGE, self._changed)
        self._abandoned = False
        """Whether nobody will ever ask for the place again."""

    # ------------------------------------------------------------------ what the handler does

    def join(self) -> Place:
        """Leave the present round, and wait for the next one.

        Returns:
            The node's rank in the next round.

        Raises:
            RefusedError: the coordinator refused. ``.reason`` says why; a timeout and a closed run are among
                the reasons.
            ConnectError: it could not be reached: at first within the connect timeout, later within the join
                timeout.
        """
        self._check_owner()
        with self._changed:
            self._check_run()
            self._dialogue.join()
            _alive.add(self)
            self._stream.start(f"muster-node-{self._dialogue.attempt}")
            self._changed.notify_all()
            return self._await_place()

    def _await_place(self) -> Place:
        dialogue = self._dialogue
        while dialogue.place is None:
            if dialogue.error is not None:
                # Raise a copy: an error keeps the frames that it passed alive, and so the handler.
                raise copy(dialogue.error)
            # Only lost contact is measured here. The coordinator measures the join timeout.
            limit = self.config.join_timeout if dialogue.met else self.config.connect_timeout
            left = self._stream.seconds_left(limit)
            if left is not None and left <= 0:
                dialogue.error = ConnectError(self._unreachable(limit))
                self._stream.interrupt()
                self._changed.notify_all()
                raise copy(dialogue.error)
            self._changed.wait(left)
        return dialogue.place

    @property
    def nodes_waiting(self) -> int:
        """The number of nodes that wait to be let in, including this one if it lost its place."""
        evicted_at = self._dialogue.evicted_at
        if evicted_at is not None:
            # The agent ends its workers, and hears at its next join that it was evicted.
            return int(time.monotonic() >= evicted_at + HEAD_START)
        return max(self._dialogue.waiting, int(self._dialogue.fenced))

    @property
    def nodes_lost(self) -> int:
        """The number of nodes that the round has lost, if the agents may go on without them."""
        return 0 if self._dialogue.closed is not None else self._dialogue.lost

    @property
    def evicted(self) -> bool:
        """Whether an operator has sent this node away for good."""
        return self._dialogue.evicted_at is not None

    @property
    def stopped(self) -> bool:
        """Whether this node knows that the run was stopped, to be resumed by other agents."""
        return self._dialogue.knows_stopped

    def ask_stopped(self, timeout: float) -> bool:
        """Return whether the run was stopped. If this node was not told, ask the coordinator.

        Args:
            timeout: seconds that the answer may take; without an answer the run counts as not stopped.
        """
        if self.stopped or self._dialogue.attempt == 0 or os.getpid() != self._owner:
            return self.stopped
        try:
            rendezvous = self._get(timeout)
        except MusterError as error:
            logger.warning("whether run %s was stopped is not known: %s", self.config.run_id, error)
            return False
        return rendezvous.HasField("stopped") and self._was_in(rendezvous.stopped)

    def _was_in(self, stopped: common_pb2.Stopped) -> bool:
        """Whether this node was in the stopped round. A new agent that fails has not stopped."""
        place = self._dialogue.place
        return place is not None and place.round <= stopped.generation

    @property
    def closed(self) -> bool | None:
        """Whether the run is closed; None if this node has no place, so that nobody tells it.

        While the node reconnects, it is the last known state.
        """
        return self._dialogue.knows_closed

    def ask_closed(self) -> bool:
        """Ask the coordinator whether the run is closed.

        Raises:
            ConnectError: it did not answer.
            RefusedError: it refused.
        """
        self._check_owner()
        try:
            return self._get(self.config.connect_timeout).HasField("closed")
        except RefusedError as error:
            if error.reason == "RUN_NOT_FOUND":
                return False
            raise

    def _get(self, timeout: float) -> pb.Rendezvous:
        """Ask the coordinator for the rendezvous of the run."""
        request = pb.RendezvousServiceGetRequest(run_id=self.config.run_id)
        return self._ask(lambda channel: _stub(channel).Get, request, timeout).rendezvous

    def close(self, reason: str, timeout: float) -> None:
        """Close the run for everyone, for good. A run that was stopped, to be resumed, is not closed.

        Args:
            reason: why, for people.
            timeout: seconds that it may take.

        Raises:
            ConnectError: the coordinator did not answer in time.
            RefusedError: it refused.
        """
        self._check_owner()
        self._check_run()
        by = f"node {self.config.address} (pid {os.getpid()})"
        request = pb.CloseRequest(run_id=self.config.run_id, by=by, reason=reason, create=True)
        answer = self._ask(lambda channel: _stub(channel).Close, request, timeout)
        if not answer.HasField("stopped"):
            self._dialogue.closed, self._dialogue.stopped = closed_from_pb(answer.closed), None
        elif self._was_in(answer.stopped):
            self._dialogue.stopped = stopped_from_pb(answer.stopped)

    def leave(self, reason: str) -> None:
        """Give the place up. Nothing happens without a place, or if the coordinator cannot be reached."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            owes_goodbye = self._dialogue.leave()
            self._stream.interrupt()
            self._changed.notify_all()
            thread = self._stream.thread
        _alive.discard(self)
        if owes_goodbye:
            self._say_goodbye(reason)
        if thread is not None:
            thread.join(self.config.call_timeout)
        collect()

    def abandon(self) -> None:
        """Give the place up without waiting, as a finalizer must. The stream's thread tells the coordinator.

        The next fork waits for that thread, so that the child may have a membership of its own.
        """
        if os.getpid() != self._owner:
            return
        self._abandoned = True
        self._stream.interrupt()
        if self._stream.thread is not None:
            await_before_fork(self._stream.thread)

    def _say_goodbye(self, reason: str) -> None:
        request = pb.LeaveRequest(
            run_id=self.config.run_id, incarnation=self._dialogue.node.incarnation, reason=reason
        )
        try:
            self._ask(lambda channel: _stub(channel).Leave, request, self.config.call_timeout, wait=False)
        except MusterError as error:
            logger.info("this node leaves, and could not say so: %s", error)

    def _ask(
        self, method: Method[Response], request: Message, timeout: float, *, wait: bool = True
    ) -> Response:
        search = Search(replicas_of(self.config.endpoint))
        try:
            return ask_leader(search, self._channel, method, request, timeout, wait=wait)
        except EnvironmentValueError as error:
            raise self._failure(error, str(error)) from None
        except grpc.RpcError as error:
            raise self._failure(error, search.said) from None

    @contextmanager
    def _channel(self, target: Target) -> Iterator[grpc.Channel]:
        """A channel for one call."""
        with GrpcUsage(USAGE), open_channel(target) as channel:
            yield channel

    # ------------------------------------------------------------------ what the stream asks for

    @property
    def done(self) -> bool:
        """Whether the node holds and wants no place."""
        return self._abandoned or self._dialogue.done

    def open(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...]) -> grpc.Call:
        """Ask for a place, or for the one that the node has."""
        with self._changed:
            request = self._dialogue.request(time.monotonic())
        return _stub(channel).Join(request, metadata=metadata)

    def handle(self, response: pb.JoinResponse) -> StreamSignal:
        """Handle a message."""
        if response.HasField("replicas"):
            return self._stream.learn(response.replicas.addresses, response.replicas.keepalive_ms)
        with self._changed:
            if self._stream.open:
                self._stream.admit()
                self._dialogue.handle(response, time.monotonic())
                self._changed.notify_all()
        place, gone = self._dialogue.place, self._dialogue.nodes_gone
        if response.HasField("stopped") and place is not None and gone and self._on_departure is not None:
            self._on_departure(place, gone)
        return StreamSignal.ANSWERED

    def call_ended(self, error: grpc.RpcError | None) -> None:
        """End the attempt if the coordinator has refused it."""
        if error is None:
            return
        failure = self._failure(error, explain(error))
        with self._changed:
            if not self._stream.open or not isinstance(failure, RefusedError):
                return
            if self._dialogue.is_transient(failure.reason):
                return
            if not (self._dialogue.admitted and self._stream.patience.lasts(failure.reason)):
                self._dialogue.refused(failure, time.monotonic())
                self._changed.notify_all()

    def lost(self) -> None:
        """Nothing is sent on the stream, so nothing is lost with it."""

    def finished(self) -> None:
        """Tell the coordinator that the node leaves, if nobody else will."""
        if self._abandoned and not self._dialogue.done:
            _alive.discard(self)
            if self._dialogue.met:
                self._say_goodbye("nobody holds its handler any more")

    # ------------------------------------------------------------------ checks and errors

    def _check_run(self) -> None:
        """Do not start a forgotten run again, whose id may be another job's by now, nor join when evicted."""
        error = self._dialogue.error
        if isinstance(error, RefusedError) and error.reason in (FORGOTTEN, EVICTED):
            raise copy(error)

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise forked("this node's place", self._owner)

    def _failure(self, error: grpc.RpcError | EnvironmentValueError, said: str) -> MusterError:
        """Return a failed call's error: the coordinator has refused it, or could not be reached."""
        if isinstance(error, EnvironmentValueError):
            return ConnectError(f"the coordinator at {self.config.endpoint} could not be asked: {error}")
        reason = reason_of(error)
        if reason and reason not in ELSEWHERE:
            return RefusedError(str(error.details()), reason)
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return RefusedError(
                f"{self.config.endpoint} does not serve muster.v1.RendezvousService: another program listens "
                "there, or a coordinator of an older version. Check the address (--rdzv-endpoint).",
                "UNIMPLEMENTED",
            )
        return ConnectError(
            f"the coordinator at {self.config.endpoint} did not answer: {said}. Check the address "
            "(--rdzv-endpoint) and that it runs: muster get runs."
        )

    def _unreachable(self, seconds: float) -> str:
        return (
            f"the coordinator at {self.config.endpoint} could not be reached within the timeout of "
            f"{seconds:g} s; last error: {self._stream.search.said}. Check "
            f"the address (--rdzv-endpoint) and that it runs: muster get runs."
        )


def _stub(channel: grpc.Channel) -> rendezvous_pb2_grpc.RendezvousServiceStub:
    return rendezvous_pb2_grpc.RendezvousServiceStub(channel)


_alive: "weakref.WeakSet[NodeMembership]" = weakref.WeakSet()


def _leave_all() -> None:
    for membership in list(_alive):
        membership.leave("the agent ended")


atexit.register(_leave_all)
