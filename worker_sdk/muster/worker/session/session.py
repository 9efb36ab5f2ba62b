"""The session that a worker process holds to the coordinator.

One thread opens the stream, says hello, and reads what comes; when the stream breaks it opens another
and says again all that is still open, which is always safe. The calling threads only wait. A forked
child must not touch a session: it belongs to the process that opened it.
"""

import logging
import os
import queue
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import grpc
from google.rpc.error_details_pb2 import ErrorInfo

from muster.client.calls import ELSEWHERE, reason_of, search_on
from muster.client.credentials import TokenPatience, check_credentials
from muster.client.errors import EnvironmentValueError
from muster.client.jitter import jittered
from muster.client.protocol import PROTOCOL_VERSION
from muster.client.replicas import KEEPALIVE_MS, Search, replicas_of
from muster.v1 import session_pb2 as pb
from muster.v1 import session_pb2_grpc
from muster.v1.insight_pb2 import Inspect, Inspected
from muster.worker.closed import Closed, closed_from_pb
from muster.worker.decision import Decision, Outcome, decision_from_pb
from muster.worker.errors import ConnectError, MusterError, OutcomeUnknownError, RefusedError
from muster.worker.groups.group import Group, Shape
from muster.worker.groups.pending import EarlyWarning, Pending, check_payload, pending
from muster.worker.groups.write_report import WriteReport
from muster.worker.insight.inspection import Inspection
from muster.worker.session.age import age
from muster.worker.session.save_request import SaveAsked, asked_from_pb
from muster.worker.steps import News
from muster.worker.transport.channel import open_channel
from muster.worker.transport.first_answer import first_answer_expected
from muster.worker.transport.fork_guard import start_thread
from muster.worker.transport.outage import Outage
from muster.worker.version import VERSION

logger = logging.getLogger(__name__)

DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""How a stream ends whose token, role or run the coordinator does not accept."""
GOODBYE_TIMEOUT = 2.0
"""Seconds that a goodbye may take when the process ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Who speaks, and to which coordinator. Sessions with equal configs are one session."""

    endpoint: str
    run_id: str
    generation: int
    rank: int
    host: str
    node_rank: int | None = None


class Session:
    """A process's session, kept open until it is closed.

    Args:
        config: who speaks, and to whom.

    Raises:
        EnvironmentValueError: the token or a certificate cannot be used.
    """

    def __init__(self, config: SessionConfig) -> None:
        check_credentials(config.endpoint)
        self.config = config
        self._process = pb.Process(
            rank=config.rank,
            incarnation=uuid.uuid4().hex,
            host=config.host,
            pid=os.getpid(),
            node_rank=config.node_rank,
        )
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._groups: dict[str, Group] = {}
        self._outbox: queue.SimpleQueue[pb.ConnectRequest | None] | None = None
        self._call: grpc.Call | None = None
        self._connected = False
        self._lost_at = time.monotonic()
        self._search = Search(replicas_of(config.endpoint))
        self._outage = Outage(config.endpoint)
        self._patience = TokenPatience(config.endpoint)
        self._fatal: MusterError | None = None
        self._max_payload_bytes: int | None = None
        self._keepalive_ms = KEEPALIVE_MS
        self.closed: Closed | None = None
        """How the run was closed, as the coordinator told."""
        self.save_asked: SaveAsked | None = None
        """The save that all ranks were asked for last."""
        self._closing = False
        self._reason = ""
        self._inspection = Inspection()
        self._news = News()
        self._arrived_at: float | None = None
        """When this process last arrived at a barrier."""
        self._parted = False
        """Whether the coordinator has heard our goodbye, or never knew us."""
        self._stop = threading.Event()
        self._thread = start_thread("a session", f"muster-session-{config.rank}", self._run)

    @property
    def dismissed(self) -> bool:
        """Whether the coordinator sent this process away, alone or with its whole run."""
        return isinstance(self._fatal, RefusedError) and self._fatal.reason in ("EVICTED", "RUN_FORGOTTEN")

    @property
    def ended(self) -> bool:
        """Whether it was closed, or the coordinator refused it for good."""
        return self._fatal is not None

    # ------------------------------------------------------------------ what callers do

    def join(self, prefix: str, shape: Shape, timeout: float) -> None:
        """Take part in a group; joining it again changes nothing.

        Args:
            prefix: the group.
            shape: whom its barriers cover.
            timeout: seconds to wait for the coordinator.

        Raises:
            ConnectError: the coordinator did not answer in time.
            RefusedError: it refused.
        """
        self._check_owner()
        deadline = time.monotonic() + timeout
        with self._changed:
            self._raise_fatal()
            group = self._groups.get(prefix)
            if group is None or group.error is not None:
                group = Group(prefix, shape)
                # What cannot be said must not stay in the table, for it is said at each Welcome.
                request = group.join_request()
                self._groups[prefix] = group
                if self._outbox is not None:
                    self._outbox.put(request)
            elif group.shape != shape:
                raise RefusedError(
                    f'this process has joined group "{prefix}" with {group.shape} already, and '
                    f"cannot join it with {shape} as well. Use another prefix.",
                    "SHAPE_CHANGED",
                )
            while group.position is None:
                self._raise_fatal()
                if group.error is not None:
                    raise group.error
                left = deadline - time.monotonic()
                if left <= 0:
                    if self._groups.get(prefix) is group:
                        del self._groups[prefix]
                    raise ConnectError(self._unreachable(timeout))
                self._changed.wait(left)

    def barrier(
        self,
        prefix: str,
        timeout: float,
        payload: bytes = b"",
        failure: str | None = None,
        early: EarlyWarning | None = None,
        report: WriteReport | None = None,
    ) -> Decision:
        """Arrive at the group's next barrier, and wait for its decision.

        Args:
            prefix: a group that was joined.
            timeout: seconds; the coordinator counts them from the barrier's first arrival.
            payload: bytes for all the others.
            failure: a vote: this rank failed, for this reason.
            early: when to log who is missing, if that is to be before half of the timeout.
            report: this rank's part of a save, for people.

        Returns:
            The decision, whatever its outcome.

        Raises:
            OutcomeUnknownError: the coordinator could not be reached for as long as ``timeout``.
            RefusedError: it refused the arrival.
        """
        self._check_owner()
        group = self._groups[prefix]
        with group.turn, self._changed:
            assert group.position is not None
            check_payload(payload, self._max_payload_bytes)
            place = prefix, group.position, timeout, self.config.rank
            arrival = pending(*place, payload, failure, early, report)
            group.pending = arrival
            self._arrived_at = time.monotonic()
            # Without a stream, the next one begins with all that is open.
            if self._outbox is not None:
                self._outbox.put(arrival.message())
            try:
                decision = self._await(arrival, time.monotonic())
                group.position = decision.sequence + 1
                return decision
            finally:
                group.pending = None

    def next_save_asked(self, known: SaveAsked | None) -> SaveAsked:
        """Wait until another save is asked for than this one.

        Raises:
            MusterError: the session is over.
        """
        with self._changed:
            while (asked := self.save_asked) is None or asked is known:
                self._raise_fatal()
                self._changed.wait()
            return asked

    def skip_to(self, prefix: str, sequence: int) -> None:
        """Go on at a later barrier of a group that was joined, if this process is not that far."""
        with self._changed:
            group = self._groups[prefix]
            assert group.position is not None
            group.position = max(group.position, sequence)

    def position(self, prefix: str) -> int:
        """The sequence of this process's next barrier in a group that was joined."""
        position = self._groups[prefix].position
        assert position is not None
        return position

    def _await(self, pending: Pending, started: float) -> Decision:
        while pending.result is None:
            self._raise_fatal()
            left = None
            if not self._connected:
                # Only contact that is lost is measured here; deadlines are the coordinator's.
                left = max(started, self._lost_at) + pending.timeout - time.monotonic()
                if left <= 0:
                    raise self._unknown(pending)
            self._changed.wait(left)
        if isinstance(pending.result, MusterError):
            raise pending.result
        return pending.result

    def close(self, reason: str = "") -> None:
        """Say goodbye and end the session; closing twice does no harm."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._reason = reason
            if self._outbox is not None:
                self._say_goodbye(self._outbox)
            elif not self._process.ordinal:
                self._parted = True
            self._fatal = self._fatal or MusterError("the session of this process is closed.")
            self._stop.set()
            self._changed.notify_all()
        self._thread.join(GOODBYE_TIMEOUT)
        call = self._call
        if self._thread.is_alive() and call is not None:
            call.cancel()

    # ------------------------------------------------------------------ the session's thread

    def _run(self) -> None:
        last = False
        while not last:
            last = self._stop.is_set()
            try:
                pause = self._converse()
            except EnvironmentValueError as error:
                # Files that are being replaced may be unusable for a moment.
                pause = self._search.denied(str(error))
            except Exception as error:
                logger.exception("the session with %s broke", self.config.endpoint)
                pause = self._search.again(f"{type(error).__name__}: {error}")
            self._lost(self._search.said)
            # Who was welcomed owes a goodbye: one more attempt, if it closes while it has no stream, at each
            # of several that may lead.
            last = last and pause > 0
            if self._fatal is not None and (last or self._parted or not self._closing):
                return
            self._stop.wait(pause)

    def _converse(self) -> float:
        """Open a stream and read it to its end.

        Returns:
            Seconds to wait before another one.
        """
        search = self._search
        target = search.begin()
        self._keepalive_ms = min(target.keepalive_ms, self._keepalive_ms)
        channel = open_channel(replace(target, keepalive_ms=self._keepalive_ms))
        try:
            outbox: queue.SimpleQueue[pb.ConnectRequest | None] = queue.SimpleQueue()
            outbox.put(self._hello())
            stub = session_pb2_grpc.SessionServiceStub(channel)
            self._news = News()
            call = stub.Connect(self._requests(outbox, self._news), metadata=search.metadata)
            self._call = call
            try:
                with first_answer_expected(call) as welcomed:
                    for response in call:
                        kind = response.WhichOneof("message")
                        if kind == "welcome":
                            search.answered()
                            welcomed()
                        elif kind == "drain" and search.replicas.several:
                            return search.left("the coordinator is stopping")
                        if self._handle(kind, response, outbox):
                            return search.again("the coordinator ended the session")
                self._parted = self._closing
                return search.ended("the coordinator ended the session")
            except grpc.RpcError as error:
                self._denied(error)
                return search_on(search, error)
            finally:
                outbox.put(None)
                call.cancel()
                self._call = None
        finally:
            channel.close()

    def _requests(
        self, outbox: "queue.SimpleQueue[pb.ConnectRequest | None]", news: News
    ) -> Iterator[pb.ConnectRequest]:
        """What is said on one stream, and in between every few seconds how far the training has come."""
        while True:
            with suppress(queue.Empty):
                if (request := outbox.get(timeout=news.interval)) is None:
                    return
                yield request
            if (number := news.take(time.monotonic())) is not None:
                step = pb.RankStep(rank=self.config.rank, step=number)
                yield pb.ConnectRequest(steps=pb.Steps(steps=[step]))

    def _handle(
        self,
        kind: str | None,
        response: pb.ConnectResponse,
        outbox: "queue.SimpleQueue[pb.ConnectRequest | None]",
    ) -> bool:
        """Take one message; True ends the stream, to open another."""
        if kind == "drain":
            # Not under the lock: callers may want to close meanwhile.
            self._stop.wait(jittered(response.drain.retry_after_ms / 1000, 0.5, 1.5))
            return True
        if kind == "inspect":
            # Not under the lock: it may be what the process is stuck at.
            outbox.put(self._inspected(response.inspect))
            return False
        if kind == "welcome" and self._must_ping_faster(response.welcome):
            return True
        with self._changed:
            if kind == "decision":
                decision = response.decision
                pending = self._pending(decision.prefix, decision.sequence)
                if pending is not None:
                    pending.result = decision_from_pb(decision)
            elif kind == "welcome":
                self._welcomed(response.welcome, outbox)
            elif kind == "group_joined":
                group = self._groups.get(response.group_joined.prefix)
                if group is not None and group.position is None:
                    group.position = response.group_joined.positions[0].sequence
            elif kind == "progress":
                progress = response.progress
                if arrival := self._pending(progress.prefix, progress.sequence):
                    logger.warning("%s", arrival.warning(progress.message))
            elif kind == "closed":
                self._heard_closed(closed_from_pb(response.closed))
            elif kind == "save_asked":
                self.save_asked = asked_from_pb(response.save_asked)
            elif kind == "refusal":
                self._refused(response.refusal)
            self._changed.notify_all()
        return False

    def _inspected(self, question: Inspect) -> pb.ConnectRequest:
        """What this process is doing."""
        waits_at = [at for group in list(self._groups.values()) if (at := group.waits_at()) is not None]
        report = self._inspection.report(waits_at, self._arrived_at, all_threads=question.all_threads)
        answer = Inspected(question=question.question, rank=self.config.rank, report=report)
        return pb.ConnectRequest(inspected=answer)

    def _heard_closed(self, closed: Closed) -> None:
        if self.closed is None:
            logger.warning("run %s was closed by %s; barriers go on", self.config.run_id, closed)
        self.closed = closed

    def _welcomed(self, welcome: pb.Welcome, outbox: "queue.SimpleQueue[pb.ConnectRequest | None]") -> None:
        self._process.ordinal = welcome.ordinals[0]
        self._news.welcomed(welcome.steps_interval_ms / 1000)
        self._max_payload_bytes = welcome.max_payload_bytes
        if self._closing:
            self._say_goodbye(outbox)
            return
        self._outbox = outbox
        self._connected = True
        self._outage.over()
        self._patience.renew()
        for group in self._groups.values():
            outbox.put(group.join_request())
            if group.pending is not None:
                outbox.put(group.pending.message())
        logger.info(
            "connected to %s as rank %d of run %s, generation %d",
            self._search.target.address,
            self.config.rank,
            self.config.run_id,
            self.config.generation,
        )

    def _must_ping_faster(self, welcome: pb.Welcome) -> bool:
        """Whether this stream's keepalive is too slow for what is asked for, so that it must be replaced."""
        self._search.replicas.learn(welcome.replicas, welcome.keepalive_ms)
        keepalive_ms = welcome.keepalive_ms or welcome.session_ttl_ms // 3
        if keepalive_ms >= self._keepalive_ms:
            return False
        self._keepalive_ms = keepalive_ms
        self._process.ordinal = welcome.ordinals[0]
        return True

    def _say_goodbye(self, outbox: "queue.SimpleQueue[pb.ConnectRequest | None]") -> None:
        outbox.put(pb.ConnectRequest(goodbye=pb.Goodbye(reason=self._reason)))
        outbox.put(None)

    def _refused(self, refusal: pb.Refusal) -> None:
        info = ErrorInfo()
        refusal.error_info.Unpack(info)
        error = RefusedError(refusal.message, info.reason)
        group = self._groups.get(refusal.prefix)
        if not refusal.prefix or group is None:
            if not self._passes(info.reason):
                self._fatal = error
        elif refusal.HasField("sequence"):
            pending = self._pending(refusal.prefix, refusal.sequence)
            if pending is not None:
                pending.result = error
                group.go_on_after(info.reason, info.metadata)
        else:
            group.error = error
            if group.pending is not None:
                group.pending.result = error

    def _passes(self, reason: str) -> bool:
        """Whether a refused Hello may be said again.

        The incarnation is ours alone, so another session of it is a late Hello of our own; and who was
        welcomed before finds room again when the coordinator has seen the old streams end.
        """
        passing = reason == "SESSION_REPLACED" or reason in ELSEWHERE
        return passing or (reason == "LIMIT_EXCEEDED" and self._process.ordinal > 0)

    def _lost(self, why: str) -> None:
        with self._changed:
            self._outbox = None
            if self._connected:
                self._connected = False
                self._lost_at = time.monotonic()
                if not self._closing:
                    logger.warning(
                        "lost the coordinator at %s (%s); connecting again", self.config.endpoint, why
                    )
            self._outage.failed(why)
            self._changed.notify_all()

    def _denied(self, error: grpc.RpcError) -> None:
        """Give up if the coordinator does not let this process in, and no other token is to be expected."""
        if error.code() not in DENIED:
            return
        reason = reason_of(error)
        if self._process.ordinal > 0 and self._patience.lasts(reason):
            return
        with self._changed:
            self._fatal = RefusedError(str(error.details()), reason)
            self._changed.notify_all()

    # ------------------------------------------------------------------ messages

    def _hello(self) -> pb.ConnectRequest:
        self._process.age_ms = int(age() * 1000)
        return pb.ConnectRequest(
            hello=pb.Hello(
                run_id=self.config.run_id,
                generation=self.config.generation,
                processes=[self._process],
                sdk_version=VERSION,
                protocol_version=PROTOCOL_VERSION,
            )
        )

    def _pending(self, prefix: str, sequence: int) -> Pending | None:
        group = self._groups.get(prefix)
        pending = group.pending if group is not None else None
        return pending if pending is not None and pending.request.sequence == sequence else None

    # ------------------------------------------------------------------ checks and errors

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise MusterError(
                f"this session belongs to process {self._owner}, and process {os.getpid()} was forked "
                "from it: gRPC does not work across a fork. Report to the parent by exit code or pipe, "
                "or start the process by spawn and make the barrier there."
            )

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    def _unreachable(self, timeout: float) -> str:
        return (
            f"the coordinator at {self.config.endpoint} did not answer within the timeout of "
            f"{timeout:g} s; last error: {self._search.said}. Check "
            f"the address (MUSTER_ENDPOINT) and that it runs: muster get runs."
        )

    def _unknown(self, pending: Pending) -> OutcomeUnknownError:
        prefix, sequence = pending.request.prefix, pending.request.sequence
        return OutcomeUnknownError(
            f'the outcome of barrier "{prefix}" #{sequence} of run {self.config.run_id} is unknown: '
            f"{self._unreachable(pending.timeout)} Execute the barrier again to ask for its outcome.",
            prefix,
            sequence,
            Outcome.UNKNOWN,
        )
