"""The session that a worker process holds to the coordinator.

The stream's thread sends and receives; the calling threads only wait. A forked child must not use a session:
it belongs to the process that opened it.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import grpc

from muster.client.calls import reason_of
from muster.client.credentials import check_credentials
from muster.client.jitter import jittered
from muster.v1 import session_pb2 as pb
from muster.v1 import session_pb2_grpc
from muster.v1.insight_pb2 import Inspect, Inspected
from muster.worker.closed import Closed
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import ConnectError, MusterError, OutcomeUnknownError, RefusedError
from muster.worker.groups.group import Group, Shape
from muster.worker.groups.pending import EarlyWarning, Pending, check_payload, pending
from muster.worker.groups.write_report import WriteReport
from muster.worker.insight.inspection import Inspection
from muster.worker.session.dialogue import SessionConfig as SessionConfig
from muster.worker.session.dialogue import SessionDialogue
from muster.worker.session.save_request import SaveAsked
from muster.worker.steps import StepReporter
from muster.worker.transport.stream import ReconnectingStream, StreamSignal

logger = logging.getLogger(__name__)

DENIED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""How a stream ends if the coordinator does not accept the token, its role, or the run."""
GOODBYE_TIMEOUT = 2.0
"""Seconds that a goodbye may take when the process ends."""


class Session:
    """A process's session, kept open until it is closed.

    Args:
        config: the process, and its coordinator.

    Raises:
        EnvironmentValueError: the token or a certificate cannot be used.
    """

    def __init__(self, config: SessionConfig) -> None:
        check_credentials(config.endpoint)
        self.config = config
        self._dialogue = SessionDialogue(config)
        self._owner = os.getpid()
        self._changed = threading.Condition()
        """Guards the dialogue."""
        self._outbox: queue.SimpleQueue[pb.ConnectRequest | None] = queue.SimpleQueue()
        """What is sent on the present stream; None ends it."""
        self._inspection = Inspection()
        self._steps = StepReporter()
        self._arrived_at: float | None = None
        """When this process last arrived at a barrier."""
        self._stream = ReconnectingStream(self, config.endpoint, "a session", self._changed)
        with self._changed:
            self._stream.start(f"muster-session-{config.rank}")

    @property
    def has_contact(self) -> bool:
        """Whether the coordinator has admitted this process on the present stream."""
        return self._stream.connected

    @property
    def dismissed(self) -> bool:
        """Whether the coordinator sent this process away, alone or with its whole run."""
        fatal = self._dialogue.fatal
        return isinstance(fatal, RefusedError) and fatal.reason in ("EVICTED", "RUN_FORGOTTEN")

    @property
    def ended(self) -> bool:
        """Whether it was closed, or the coordinator refused it for good."""
        return self._dialogue.fatal is not None

    @property
    def closed(self) -> Closed | None:
        """How the run was closed, as the coordinator said; None while it is open."""
        return self._dialogue.closed

    @property
    def save_asked(self) -> SaveAsked | None:
        """The save that all ranks were asked for last."""
        return self._dialogue.save_asked

    # ------------------------------------------------------------------ what callers do

    def join(self, prefix: str, shape: Shape, timeout: float) -> None:
        """Take part in a group. To join it again changes nothing.

        Args:
            prefix: the group.
            shape: the ranks that its barriers cover.
            timeout: seconds to wait for the coordinator.

        Raises:
            ConnectError: the coordinator did not answer in time.
            RefusedError: it refused.
        """
        self._check_owner()
        deadline = time.monotonic() + timeout
        with self._changed:
            self._raise_fatal()
            group = self._dialogue.groups.get(prefix)
            if group is None or group.error is not None:
                group = Group(prefix, shape)
                # Make the request first: a group that cannot be encoded must not get into the table, whose
                # groups are sent at each Welcome.
                request = group.join_request()
                self._dialogue.groups[prefix] = group
                if self._stream.connected:
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
                    if self._dialogue.groups.get(prefix) is group:
                        del self._dialogue.groups[prefix]
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
            early: when to log which ranks are missing, if earlier than after half of the timeout.
            report: this rank's part of a save, for people.

        Returns:
            The decision, whatever its outcome.

        Raises:
            OutcomeUnknownError: the coordinator could not be reached for as long as ``timeout``.
            RefusedError: it refused the arrival.
        """
        self._check_owner()
        group = self._dialogue.groups[prefix]
        with group.turn, self._changed:
            assert group.position is not None
            check_payload(payload, self._dialogue.max_payload_bytes)
            place = prefix, group.position, timeout, self.config.rank
            arrival = pending(*place, payload, failure, early, report)
            group.pending = arrival
            self._arrived_at = time.monotonic()
            # Without a stream, the next one starts with all open messages.
            if self._stream.connected:
                self._outbox.put(arrival.message())
            try:
                decision = self._await(arrival, time.monotonic())
                group.position = decision.sequence + 1
                return decision
            finally:
                group.pending = None

    def _await(self, pending: Pending, started: float) -> Decision:
        while pending.result is None:
            self._raise_fatal()
            # Only lost contact is measured here. The coordinator measures deadlines.
            left = self._stream.seconds_left(pending.timeout, started)
            if left is not None and left <= 0:
                raise self._unknown(pending)
            self._changed.wait(left)
        if isinstance(pending.result, MusterError):
            raise pending.result
        return pending.result

    def next_save_asked(self, known: SaveAsked | None) -> SaveAsked:
        """Wait until all ranks are asked for another save than this one.

        Raises:
            MusterError: the session is over.
        """
        with self._changed:
            while (asked := self.save_asked) is None or asked is known:
                self._raise_fatal()
                self._changed.wait()
            return asked

    def skip_to(self, prefix: str, sequence: int) -> None:
        """Continue at a later barrier of a group that was joined, if this process is not that far."""
        with self._changed:
            group = self._dialogue.groups[prefix]
            assert group.position is not None
            group.position = max(group.position, sequence)

    def position(self, prefix: str) -> int:
        """Return the sequence of this process's next barrier in a group that was joined."""
        position = self._dialogue.groups[prefix].position
        assert position is not None
        return position

    def close(self, reason: str = "") -> None:
        """Say goodbye and end the session. To close it twice does no harm."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            if self._dialogue.closing:
                return
            self._dialogue.close(reason, connected=self._stream.connected)
            if self._stream.connected:
                self._send_goodbye()
            self._stream.finish()
            thread = self._stream.thread
        assert thread is not None
        thread.join(GOODBYE_TIMEOUT)
        call = self._stream.call
        if thread.is_alive() and call is not None:
            call.cancel()

    def _send_goodbye(self) -> None:
        self._outbox.put(self._dialogue.goodbye())
        self._outbox.put(None)

    # ------------------------------------------------------------------ what the stream asks for

    @property
    def done(self) -> bool:
        """Whether there is nothing left to say or to hear."""
        return self._dialogue.done

    def open(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...]) -> grpc.Call:
        """Start a stream with a Hello."""
        self._outbox, self._steps = queue.SimpleQueue(), StepReporter()
        self._outbox.put(self._dialogue.hello())
        stub = session_pb2_grpc.SessionServiceStub(channel)
        return stub.Connect(self._requests(self._outbox, self._steps), metadata=metadata)

    def _requests(
        self, outbox: "queue.SimpleQueue[pb.ConnectRequest | None]", steps: StepReporter
    ) -> Iterator[pb.ConnectRequest]:
        """Yield one stream's messages; every few seconds also the training step, if it has changed."""
        while True:
            with suppress(queue.Empty):
                if (request := outbox.get(timeout=steps.interval)) is None:
                    return
                yield request
            if (number := steps.take(time.monotonic())) is not None:
                step = pb.RankStep(rank=self.config.rank, step=number)
                yield pb.ConnectRequest(steps=pb.Steps(steps=[step]))

    def handle(self, response: pb.ConnectResponse) -> StreamSignal:
        """Handle a message."""
        kind = response.WhichOneof("message")
        if kind == "inspect":
            # Not under the lock: the process may be stuck at it.
            self._outbox.put(self._inspected(response.inspect))
            return StreamSignal.NONE
        with self._changed:
            if kind == "drain":
                if not self._stream.search.replicas.several:
                    self._stream.rest(jittered(response.drain.retry_after_ms / 1000, 0.5, 1.5))
                return StreamSignal.DRAINING
            if kind == "welcome":
                return self._welcomed(response.welcome)
            self._dialogue.handle(response, time.monotonic())
            self._changed.notify_all()
            return StreamSignal.NONE

    def _welcomed(self, welcome: pb.Welcome) -> StreamSignal:
        signal = self._stream.learn(welcome.replicas, welcome.keepalive_ms, welcome.session_ttl_ms)
        if signal is StreamSignal.REPLACE:
            self._dialogue.recognized(welcome)
            return signal
        self._steps.welcomed(welcome.steps_interval_ms / 1000)
        for message in self._dialogue.welcomed(welcome):
            self._outbox.put(message)
        if self._dialogue.closing:
            self._outbox.put(None)
            return signal
        self._stream.admit()
        logger.info(
            "connected to %s as rank %d of run %s, generation %d",
            self._stream.search.target.address,
            self.config.rank,
            self.config.run_id,
            self.config.generation,
        )
        self._changed.notify_all()
        return signal

    def _inspected(self, question: Inspect) -> pb.ConnectRequest:
        """Return what this process is doing."""
        groups = list(self._dialogue.groups.values())
        waits_at = [at for group in groups if (at := group.waits_at()) is not None]
        report = self._inspection.report(waits_at, self._arrived_at, all_threads=question.all_threads)
        answer = Inspected(question=question.question, rank=self.config.rank, report=report)
        return pb.ConnectRequest(inspected=answer)

    def call_ended(self, error: grpc.RpcError | None) -> None:
        """End the session if the coordinator denies it, and the process can expect no other token."""
        with self._changed:
            if error is None:
                self._dialogue.goodbye_settled = self._dialogue.closing
            elif error.code() in DENIED:
                reason = reason_of(error)
                if not (self._dialogue.was_welcomed and self._stream.patience.lasts(reason)):
                    self._dialogue.fatal = RefusedError(str(error.details()), reason)
                    self._changed.notify_all()

    def lost(self) -> None:
        """End the messages of the stream that is gone."""
        self._outbox.put(None)

    def finished(self) -> None:
        """Nothing is left to do."""

    # ------------------------------------------------------------------ checks and errors

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise MusterError(
                f"this session belongs to process {self._owner}, and process {os.getpid()} was forked "
                "from it: gRPC does not work across a fork. Report to the parent by exit code or pipe, "
                "or start the process by spawn and make the barrier there."
            )

    def _raise_fatal(self) -> None:
        if self._dialogue.fatal is not None:
            raise self._dialogue.fatal

    def _unreachable(self, timeout: float) -> str:
        return (
            f"the coordinator at {self.config.endpoint} did not answer within the timeout of "
            f"{timeout:g} s; last error: {self._stream.search.said}. Check "
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
