"""A node's place in the rendezvous of its run.

One thread holds the stream that is the node's place, and opens another when it breaks. Joining waits for the
coordinator's answer; everything else reads what was pushed. A forked child must not touch it. The thread
holds the attendance, so one that nobody else holds any more must be told so: :meth:`Attendance.abandon`.
"""

import atexit
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass

import grpc
from google.protobuf.message import Message

from muster.client.calls import ELSEWHERE, explain, reason_of, search_on
from muster.client.credentials import TokenPatience, check_credentials
from muster.client.errors import EnvironmentValueError
from muster.client.protocol import PROTOCOL_VERSION
from muster.client.replicas import Search, Target, replicas_of
from muster.v1 import rendezvous_pb2 as pb
from muster.v1 import rendezvous_pb2_grpc
from muster.worker.closed import Closed, closed_from_pb
from muster.worker.errors import ConnectError, MusterError, RefusedError
from muster.worker.transport.channel import open_channel
from muster.worker.transport.first_answer import first_answer_expected
from muster.worker.transport.fork_guard import Claim, await_before_fork, check, collect, forked, start_thread
from muster.worker.transport.outage import Outage
from muster.worker.transport.unary import Method, Response, ask_leader
from muster.worker.version import VERSION

logger = logging.getLogger(__name__)

WHAT = "a node's place"
"""What this process speaks gRPC for."""
PASSING = frozenset({"SESSION_REPLACED", "SLOW_CONSUMER"})
"""Reasons to open another stream: our place is still there."""
FORGOTTEN = "RUN_FORGOTTEN"
"""The reason that says that an operator has removed the run: who comes again begins another one."""
CLOSING = frozenset({"RUN_CLOSED", "NODE_NOT_NEEDED", FORGOTTEN})
"""Reasons that say that the run is over."""
PLACE_LOST = CLOSING | {"NODE_REMOVED", "SUPERSEDED"}
"""The only reasons by which a node of a complete round loses its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeConfig:
    """Who joins, where, and on what terms; times in seconds."""

    endpoint: str
    run_id: str
    address: str
    min_nodes: int
    max_nodes: int
    join_timeout: float
    last_call_timeout: float
    keep_alive_timeout: float
    connect_timeout: float
    """How long the first contact with the coordinator may take."""
    call_timeout: float
    """How long leaving may take."""


@dataclass(frozen=True, slots=True)
class Place:
    """A node's rank in a round."""

    round: int
    rank: int
    world_size: int


class Attendance:
    """One life of one agent in a rendezvous.

    Args:
        config: who joins.

    Raises:
        EnvironmentValueError: the token or a certificate cannot be used.
        MusterError: this process was forked from one that speaks gRPC.
    """

    def __init__(self, config: NodeConfig) -> None:
        check_credentials(config.endpoint)
        check()
        self.config = config
        self._node = pb.Node(incarnation=uuid.uuid4().hex, address=config.address, pid=os.getpid())
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._attempt = 0
        self._place: Place | None = None
        self._waiting = 0
        self._stands_by = False
        self._waits_since: float | None = None
        """Since when a coordinator has counted this attempt's join timeout; None while none does."""
        self._fenced = False
        self._closed: Closed | None = None
        self._error: MusterError | None = None
        self._call: grpc.Call | None = None
        self._met = False
        """Whether the coordinator has ever answered."""
        self._admitted = False
        """Whether it has taken this attempt in."""
        self._connected = False
        self._lost_at = time.monotonic()
        self._replicas = replicas_of(config.endpoint)
        self._search = Search(self._replicas)
        """Of the attempt's thread."""
        self._outage = Outage(config.endpoint)
        self._patience = TokenPatience(config.endpoint)
        self._thread: threading.Thread | None = None
        self._abandoned = False
        """Whether nobody will ever ask for the place again."""

    # ------------------------------------------------------------------ what the handler does

    def join(self) -> Place:
        """Leave the round that the node is in, and wait for the next one.

        Returns:
            The node's rank in it.

        Raises:
            RefusedError: the coordinator refused; ``.reason`` says why, a timeout and a closed run among
                the reasons.
            ConnectError: it could not be reached for as long as the connect timeout at first, or the join
                timeout later.
        """
        self._check_owner()
        with self._changed:
            self._check_run()
            self._attempt += 1
            self._place = self._error = self._waits_since = None
            self._waiting = 0
            self._fenced = self._stands_by = self._admitted = False
            _alive.add(self)
            self._lost_at = time.monotonic()
            self._connected = False
            self._end_stream()
            name = f"muster-node-{self._attempt}"
            self._thread = start_thread(WHAT, name, self._hold, self._attempt)
            return self._await_place()

    def _await_place(self) -> Place:
        while self._place is None:
            if self._error is not None:
                # Copies are raised: an error holds the frames that it passed, and so the handler, for good.
                raise copy(self._error)
            left = None
            if not self._connected:
                # Only contact that is lost is measured here; the join timeout is the coordinator's.
                patience = self.config.join_timeout if self._met else self.config.connect_timeout
                left = self._lost_at + patience - time.monotonic()
                if left <= 0:
                    self._attempt += 1
                    self._end_stream()
                    self._error = ConnectError(self._unreachable(patience))
                    raise copy(self._error)
            self._changed.wait(left)
        return self._place

    @property
    def nodes_waiting(self) -> int:
        """How many nodes wait to be let in; this one itself, if it lost its place."""
        return max(self._waiting, int(self._fenced))

    @property
    def closed(self) -> bool | None:
        """Whether the run is closed, as this node was told; None if it holds no place, and is told nothing.

        While a lost stream is opened again, it is what was told last.
        """
        if self._closed is not None:
            return True
        if isinstance(self._error, RefusedError) and self._error.reason in CLOSING:
            return True
        return False if self._met and self._error is None and not self._fenced else None

    def ask_closed(self) -> bool:
        """Ask the coordinator whether the run is closed.

        Raises:
            ConnectError: it did not answer.
            RefusedError: it refused.
        """
        self._check_owner()
        request = pb.RendezvousServiceGetRequest(run_id=self.config.run_id)
        try:
            answer = self._ask(lambda channel: _stub(channel).Get, request, self.config.connect_timeout)
        except RefusedError as error:
            if error.reason == "RUN_NOT_FOUND":
                return False
            raise
        return answer.rendezvous.HasField("closed")

    def close(self, reason: str, timeout: float) -> None:
        """Close the run for everyone, for good.

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
        self._closed = closed_from_pb(answer.closed)

    def leave(self, reason: str) -> None:
        """Give the place up; nothing happens if there is none, or the coordinator cannot be reached."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            had_place = self._attempt > 0 and self._error is None and not self._fenced
            self._attempt += 1
            self._error = self._error or MusterError("this node has left the rendezvous.")
            self._end_stream()
            self._changed.notify_all()
            thread = self._thread
        _alive.discard(self)
        if had_place:
            self._say_that_it_leaves(reason)
        if thread is not None:
            thread.join(self.config.call_timeout)
        collect()

    def abandon(self) -> None:
        """Give the place up and wait for nothing, as a finalizer must: the thread that holds it says so.

        The next fork waits for that thread, so that the child may hold a place of its own.
        """
        if os.getpid() != self._owner:
            return
        self._abandoned = True
        self._attempt += 1
        call = self._call
        if call is not None:
            call.cancel()
        if self._thread is not None:
            await_before_fork(self._thread)

    def _say_that_it_leaves(self, reason: str) -> None:
        if not self._met:
            return
        request = pb.LeaveRequest(
            run_id=self.config.run_id, incarnation=self._node.incarnation, reason=reason
        )
        try:
            self._ask(lambda channel: _stub(channel).Leave, request, self.config.call_timeout, wait=False)
        except MusterError as error:
            logger.info("this node leaves, and could not say so: %s", error)

    def _ask(
        self, method: Method[Response], request: Message, timeout: float, *, wait: bool = True
    ) -> Response:
        search = Search(self._replicas)
        try:
            return ask_leader(search, self._channel, method, request, timeout, wait=wait)
        except EnvironmentValueError as error:
            raise self._failure(error, str(error)) from None
        except grpc.RpcError as error:
            raise self._failure(error, search.said) from None

    # ------------------------------------------------------------------ the stream

    def _hold(self, attempt: int) -> None:
        """Keep the place of one attempt, until another one begins or it is refused."""
        self._keep(attempt)
        if self._abandoned and self._error is None and not self._fenced:
            _alive.discard(self)
            self._say_that_it_leaves("nobody holds its handler any more")

    def _keep(self, attempt: int) -> None:
        search = self._search = Search(self._replicas)
        while self._attempt == attempt:
            try:
                pause = self._converse(attempt, search)
            except EnvironmentValueError as error:
                # Files that are being replaced may be unusable for a moment.
                pause = search.denied(str(error))
            except Exception as error:
                logger.exception("the stream to %s broke", self.config.endpoint)
                pause = search.again(f"{type(error).__name__}: {error}")
            with self._changed:
                if self._attempt != attempt or self._error is not None or self._fenced:
                    return
                if pause or self._connected:
                    self._lost(search.said)
                self._changed.wait_for(lambda: self._attempt != attempt, pause)

    def _converse(self, attempt: int, search: Search) -> float:
        """Open a stream and read it to its end. Returns how many seconds to wait before another."""
        target = search.begin()
        with self._channel(target) as channel:
            call = _stub(channel).Join(self._request(attempt), metadata=search.metadata)
            with self._changed:
                if self._attempt == attempt:
                    self._call = call
            # Looked at after the call can be seen: who gives the place up sees the one or is seen here.
            if self._attempt != attempt:
                call.cancel()
                return 0.0
            try:
                with first_answer_expected(call) as answered:
                    for response in call:
                        answered()
                        search.answered()
                        if response.HasField("replicas"):
                            self._replicas.learn(response.replicas.addresses, response.replicas.keepalive_ms)
                            if search.target.keepalive_ms < target.keepalive_ms:
                                return 0.0  # This stream would not notice soon enough that it is lost.
                            continue
                        self._take(attempt, response)
                return search.ended("the coordinator ended the stream")
            except grpc.RpcError as error:
                if self._attempt != attempt:
                    return 0.0
                failure = self._failure(error, explain(error))
                if isinstance(failure, RefusedError) and not self._passes(failure.reason):
                    self._refused(attempt, failure)
                return search_on(search, error)
            finally:
                call.cancel()

    def _passes(self, reason: str) -> bool:
        """Whether to open another stream after a refusal."""
        if self._place is not None:
            return reason not in PLACE_LOST
        if self._admitted and self._patience.lasts(reason):
            return True
        # Who was heard before finds room again when the coordinator has seen the old streams end.
        return reason in PASSING or (reason == "LIMIT_EXCEEDED" and self._met)

    def _take(self, attempt: int, response: pb.JoinResponse) -> None:
        with self._changed:
            if self._attempt != attempt:
                return
            self._met = self._connected = self._admitted = True
            self._outage.over()
            self._patience.renew()
            kind = response.WhichOneof("message")
            if kind == "round_complete":
                complete = response.round_complete
                self._stands_by, self._waits_since = False, None
                self._place = Place(complete.round, complete.rank, complete.world_size)
            elif kind == "standing":
                self._stands_by = response.standing.standing == pb.NODE_STANDING_REDUNDANT
                # Who stands by does so without end.
                self._waits_since = None if self._stands_by else self._waits_since or time.monotonic()
                logger.info("%s", response.standing.message)
            elif kind == "nodes_waiting":
                self._waiting = response.nodes_waiting.count
            elif kind == "closed":
                self._closed = closed_from_pb(response.closed)
                logger.info("run %s was closed by %s", self.config.run_id, self._closed)
            self._changed.notify_all()

    def _refused(self, attempt: int, error: RefusedError) -> None:
        with self._changed:
            if self._attempt != attempt:
                return
            self._met = True
            self._connected = False
            if error.reason == "RUN_CLOSED" and self._stands_by:
                # The coordinator was restarted, and no longer knows who stood by.
                error = RefusedError(str(error), "NODE_NOT_NEEDED")
            if self._place is not None and error.reason == "NODE_REMOVED":
                # The agent learns of it as of a node that waits: it joins again, as a newcomer.
                self._fenced = True
                self._node.incarnation = uuid.uuid4().hex
                logger.warning("%s", error)
            else:
                self._error = error
            self._changed.notify_all()

    def _lost(self, why: str) -> None:
        if self._connected:
            self._connected = False
            self._lost_at = time.monotonic()
            logger.warning("lost the coordinator at %s (%s); joining again", self.config.endpoint, why)
        self._outage.failed(why)
        self._changed.notify_all()

    def _end_stream(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None
        self._changed.notify_all()

    # ------------------------------------------------------------------ messages

    def _request(self, attempt: int) -> pb.JoinRequest:
        config, waits_since = self.config, self._waits_since
        return pb.JoinRequest(
            run_id=config.run_id,
            node=self._node,
            attempt=attempt,
            round=self._place.round if self._place is not None else None,
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            join_timeout_ms=round(config.join_timeout * 1000),
            last_call_timeout_ms=round(config.last_call_timeout * 1000),
            keep_alive_timeout_ms=round(config.keep_alive_timeout * 1000),
            sdk_version=VERSION,
            protocol_version=PROTOCOL_VERSION,
            waited_ms=round((time.monotonic() - waits_since) * 1000) if waits_since is not None else 0,
        )

    def _check_run(self) -> None:
        """Do not begin the run again, under an id that may be another job's by now."""
        if isinstance(self._error, RefusedError) and self._error.reason == FORGOTTEN:
            raise copy(self._error)

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise forked("this node's place", self._owner)

    @contextmanager
    def _channel(self, target: Target) -> Iterator[grpc.Channel]:
        """One of its own, for one call or one stream."""
        with Claim(WHAT), open_channel(target) as channel:
            yield channel

    def _failure(self, error: grpc.RpcError | EnvironmentValueError, said: str) -> MusterError:
        """What a failed call means: a refusal of the coordinator, or that it could not be reached."""
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
            f"{seconds:g} s; last error: {self._search.said}. Check "
            f"the address (--rdzv-endpoint) and that it runs: muster get runs."
        )


def _stub(channel: grpc.Channel) -> rendezvous_pb2_grpc.RendezvousServiceStub:
    return rendezvous_pb2_grpc.RendezvousServiceStub(channel)


_alive: "weakref.WeakSet[Attendance]" = weakref.WeakSet()


def _leave_all() -> None:
    for attendance in list(_alive):
        attendance.leave("the agent ended")


atexit.register(_leave_all)
