"""The coordinator as the command sees it: calls that answer, or fail with a sentence and an exit code."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

import grpc
from google.rpc.error_details_pb2 import ErrorInfo

from muster.client.calls import error_info, reason_of
from muster.service.cli.client.credentials import given
from muster.service.cli.client.leader_search import Replicas, Search
from muster.service.cli.failure import Exit, fail
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.refusal import Reason
from muster.v1 import (
    barrier_pb2,
    barrier_pb2_grpc,
    coordinator_pb2,
    coordinator_pb2_grpc,
    insight_pb2,
    insight_pb2_grpc,
    rendezvous_pb2,
    rendezvous_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
)

if TYPE_CHECKING:
    Request = TypeVar("Request")
    Response = TypeVar("Response")

KEEPALIVE_MS = 10_000
TIMERS = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    # A watch waits without a deadline: only a ping without an answer tells that the other side is gone.
    *((timer, KEEPALIVE_MS) for timer in TIMERS),
    ("grpc.http2.max_pings_without_data", 0),
]

AMONG_SEVERAL = [
    # gRPC's name is misleading: it is the time that one attempt to connect may take.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    *((timer, 2_000) for timer in TIMERS),
]
"""Where there is someone else to call, nobody is waited for so long."""
PAUSE = 0.2
"""Seconds from one turn through all replicas to the next."""
STREAM_LASTED = 5.0
"""Seconds after which a stream that has said nothing was one of a leader: a standby refuses before."""
NEVER_SENT = ("failed to connect", "DNS resolution failed", "errors resolving")
"""How the details begin of a call that has reached nobody."""

EXITS = {
    Reason.NO_OPEN_BARRIER.name: Exit.CLOSED,
    Reason.NO_SAVE_ASKED.name: Exit.CLOSED,
    Reason.COORDINATOR_DRAINING.name: Exit.UNREACHABLE,
    Reason.NOT_LEADER.name: Exit.UNREACHABLE,
}
"""The exit codes of refusals; the others are plain failures."""


class CallError(Exception):
    """A call that was not answered as it should be.

    Args:
        message: what happened, why, and what to do next.
        code: the exit code that stands for it.
        status: what the call ended with.
    """

    def __init__(self, message: str, code: Exit, status: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status = status


class _Line:
    """A channel to one coordinator, and the services on it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.runs = run_pb2_grpc.RunServiceStub(channel)
        self.barriers = barrier_pb2_grpc.BarrierServiceStub(channel)
        self.coordinator = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        self.rendezvous = rendezvous_pb2_grpc.RendezvousServiceStub(channel)
        self.insight = insight_pb2_grpc.InsightServiceStub(channel)


class Client:
    """A connection to the coordinator, whichever of its replicas leads.

    Args:
        endpoint: ``HOST:PORT``, or several with commas between.
        timeout: seconds that each request may take, at all of them together.

    Raises:
        ValueError: the endpoint is no such text.
    """

    def __init__(self, endpoint: str, timeout: float) -> None:
        self._replicas = Replicas(endpoint)
        self.endpoint = ",".join(self._replicas.given)
        self._timeout = timeout
        self._lines: dict[str, _Line] = {}

    def close(self) -> None:
        """End the connections."""
        for line in self._lines.values():
            line.channel.close()

    def status(self) -> coordinator_pb2.StatusResponse:
        """How the coordinator is."""
        return self._call(lambda line: line.coordinator.Status, coordinator_pb2.StatusRequest())

    def replicas(self) -> coordinator_pb2.ReplicasResponse:
        """The replicas of which the coordinator is one."""
        return self._call(lambda line: line.coordinator.Replicas, coordinator_pb2.ReplicasRequest())

    def runs(self) -> run_pb2.RunServiceListResponse:
        """Every run."""
        return self._call(lambda line: line.runs.List, run_pb2.RunServiceListRequest())

    def run(self, run_id: str) -> run_pb2.RunServiceGetResponse:
        """One run."""
        return self._call(lambda line: line.runs.Get, run_pb2.RunServiceGetRequest(run_id=run_id))

    def members(self, run_id: str) -> run_pb2.MembersResponse:
        """The processes of a run."""
        return self._call(lambda line: line.runs.Members, run_pb2.MembersRequest(run_id=run_id))

    def watch_runs(self, run_id: str) -> Iterator[run_pb2.Run]:
        """Each run, or the one named, now and whenever it changes."""
        shown: dict[str, run_pb2.Run] = {}
        for response in self._stream(lambda line: line.runs.Watch, run_pb2.WatchRequest(run_id=run_id)):
            # Another leader begins anew, with all of them.
            if shown.get(response.run.run_id) != response.run:
                shown[response.run.run_id] = response.run
                yield response.run

    def barrier(
        self, run_id: str, prefix: str, sequence: int | None
    ) -> barrier_pb2.BarrierServiceGetResponse:
        """One barrier; without a sequence the open one, or else the last one decided."""
        return self._call(
            lambda line: line.barriers.Get,
            barrier_pb2.BarrierServiceGetRequest(run_id=run_id, prefix=prefix, sequence=sequence),
        )

    def barriers(self, run_id: str, history: int) -> barrier_pb2.BarrierServiceListResponse:
        """The open and the newest decided barriers of a run, or of all."""
        return self._call(
            lambda line: line.barriers.List,
            barrier_pb2.BarrierServiceListRequest(run_id=run_id, history=history),
        )

    def abort(self, run_id: str, prefix: str, reason: str, sequence: int | None) -> barrier_pb2.AbortResponse:
        """End the open barrier of a group."""
        return self._call(
            lambda line: line.barriers.Abort,
            barrier_pb2.AbortRequest(run_id=run_id, prefix=prefix, reason=reason, sequence=sequence),
            unknown="whether the barrier was aborted is unknown; see: "
            f"{report.command('describe barrier', run_id, prefix)}",
        )

    def rendezvous(self, run_id: str) -> rendezvous_pb2.RendezvousServiceGetResponse:
        """The rendezvous of a run."""
        return self._call(
            lambda line: line.rendezvous.Get, rendezvous_pb2.RendezvousServiceGetRequest(run_id=run_id)
        )

    def stacks(self, request: insight_pb2.StacksRequest) -> insight_pb2.StacksResponse:
        """Where the processes of a run stand."""
        return self._call(lambda line: line.insight.Stacks, request)

    def close_run(self, request: rendezvous_pb2.CloseRequest) -> rendezvous_pb2.CloseResponse:
        """End the membership of a run, or see whom that would affect."""
        unknown = (
            f"whether the run was closed is unknown; see: {report.command('describe run', request.run_id)}"
        )
        return self._call(
            lambda line: line.rendezvous.Close, request, unknown="" if request.dry_run else unknown
        )

    def evict(self, request: run_pb2.EvictRequest) -> run_pb2.EvictResponse:
        """Send the processes of a rank away, or see whom that would affect."""
        unknown = (
            "whether the rank was evicted is unknown; see: "
            f"{report.command('describe member', request.run_id, request.rank)}"
        )
        return self._call(lambda line: line.runs.Evict, request, unknown="" if request.dry_run else unknown)

    def request_save(self, request: run_pb2.RequestSaveRequest) -> run_pb2.RequestSaveResponse:
        """Ask all ranks of a run to save at one step; it may be asked again."""
        return self._call(lambda line: line.runs.RequestSave, request)

    def cancel_save(self, request: run_pb2.CancelSaveRequest) -> run_pb2.CancelSaveResponse:
        """Withdraw that."""
        unknown = (
            f"whether it was withdrawn is unknown; see: {report.command('describe run', request.run_id)}"
        )
        return self._call(lambda line: line.runs.CancelSave, request, unknown=unknown)

    def forget(self, request: run_pb2.ForgetRequest) -> run_pb2.ForgetResponse:
        """Remove a run, or see whom that would affect."""
        unknown = (
            f"whether the run was forgotten is unknown; see: {report.command('describe run', request.run_id)}"
        )
        return self._call(lambda line: line.runs.Forget, request, unknown="" if request.dry_run else unknown)

    def _call(
        self,
        method: "Callable[[_Line], grpc.UnaryUnaryMultiCallable[Request, Response]]",
        request: "Request",
        *,
        unknown: str = "",
    ) -> "Response":
        """Ask whoever leads.

        Args:
            method: what to call.
            request: with what.
            unknown: what is unknown when a request was sent that nobody answered; empty: it changes nothing,
                and may be sent again.
        """
        deadline = time.monotonic() + self._timeout
        search = Search(self._replicas)
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            try:
                response = method(self._line(search.address))(request, timeout=left, metadata=search.metadata)
            except grpc.RpcError as error:
                self._go_on(search, error, deadline, unknown)
            else:
                self._replicas.answers(search.address)
                return response

    def _stream(
        self,
        method: "Callable[[_Line], grpc.UnaryStreamMultiCallable[Request, Response]]",
        request: "Request",
    ) -> "Iterator[Response]":
        """Listen to whoever leads; of several, to the next one when it is lost."""
        search, deadline = Search(self._replicas), time.monotonic() + self._timeout
        while True:
            began = time.monotonic()
            try:
                for response in method(self._line(search.address))(request, metadata=search.metadata):
                    self._replicas.answers(search.address)
                    began = float("-inf")
                    yield response
                return
            except grpc.RpcError as error:
                if time.monotonic() - began > STREAM_LASTED:
                    # It was there, with nothing to say perhaps.
                    search, deadline = Search(self._replicas), time.monotonic() + self._timeout
                self._go_on(search, error, deadline)

    def _line(self, address: str) -> _Line:
        if address not in self._lines:
            options = CHANNEL_OPTIONS
            if self._replicas.several:
                options = [*options, *AMONG_SEVERAL]
            mine = given()
            mine.check()
            channel = mine.open_channel(address, options, self._replicas.tls_name(address))
            self._lines[address] = _Line(channel)
        return self._lines[address]

    def _go_on(self, search: Search, error: grpc.RpcError, deadline: float, unknown: str = "") -> None:
        """Find out whom to call after a call that failed, and wait until then.

        Raises:
            CallError: nobody.
        """
        # What the synchronous gRPC raises is the call as well; its types do not say so.
        call = cast(grpc.Call, error)
        info, code, details = error_info(call), call.code(), call.details() or "no details"
        if info.reason == Reason.NOT_LEADER.name:
            replicas = info.metadata.get("replicas", "").split(",")
            more = search.not_leader(info.metadata.get("leader", ""), replicas, details)
        elif _may_be_sent_again(info, code, details, resend=not unknown):
            more = search.failed(str(given().fault(details) or details))
            if not self._replicas.several:
                raise self._explained(search, call, unknown) from error
        else:
            raise self._explained(search, call, unknown) from error
        left = deadline - time.monotonic()
        if more and left > 0:
            return
        if left <= PAUSE or not search.met_standby:
            raise self._nobody(search) from error
        time.sleep(PAUSE)
        search.begin_turn()

    def _explained(self, search: Search, call: grpc.Call, unknown: str) -> CallError:
        if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and search.met_standby and not search.followed:
            # A standby may have held the call for the rest of the time.
            search.words.setdefault(search.address, call.details() or "no details")
            return self._nobody(search)
        explained = explain(call, search.address, self._timeout)
        if unknown and (explained.code is Exit.TIMED_OUT or self._replicas.several) and not reason_of(call):
            # Without this an operator would simply repeat the command, and might end what came since.
            return CallError(f"{explained}\n  {unknown}", explained.code)
        return explained

    def _nobody(self, search: Search) -> CallError:
        """Nobody leads that we can reach: which addresses were called, and what each has met."""
        words = "".join(f"\n  {address}: {report.printable(why)}" for address, why in search.words.items())
        if search.met_standby:
            return CallError(
                f"no coordinator of {self.endpoint} leads, or can be reached that does, after "
                f"{report.seconds(self._timeout)}{words}\n"
                "  next: look at the replicas' logs, and whether they reach etcd; --timeout waits for longer",
                Exit.UNREACHABLE,
            )
        return CallError(
            f"no coordinator of {self.endpoint} can be reached{words}\n"
            "  next: check the addresses (--endpoint or MUSTER_ENDPOINT), and that muster serve runs there",
            Exit.UNREACHABLE,
        )


def _may_be_sent_again(info: ErrorInfo, code: grpc.StatusCode, details: str, *, resend: bool) -> bool:
    """Whether a request that failed is one for another replica.

    Args:
        info: the coordinator's reason, if it was its word.
        code: how the call ended.
        details: the same, for people.
        resend: whether it may be sent again although it may have been carried out.
    """
    if info.reason:
        return bool(info.reason == Reason.COORDINATOR_DRAINING.name)
    return code is grpc.StatusCode.UNAVAILABLE and (resend or details.startswith(NEVER_SENT))


def explain(error: grpc.Call, endpoint: str, timeout: float) -> CallError:
    """What a failed call means for the caller.

    Args:
        error: the call, which knows its status.
        endpoint: whom it called.
        timeout: how many seconds the coordinator had.
    """
    details = report.printable(error.details() or "no details")
    reason = reason_of(error)
    if reason:
        return CallError(details, EXITS.get(reason, Exit.FAILED))
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        if fault := given().fault(details):
            return CallError(
                f"the coordinator at {endpoint} cannot be reached: {fault.what}\n  next: {fault.next}",
                Exit.UNREACHABLE,
            )
        return CallError(
            f"the coordinator at {endpoint} cannot be reached; last error: {details}\n"
            "  next: check the address (--endpoint or MUSTER_ENDPOINT), and that muster serve runs there",
            Exit.UNREACHABLE,
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return CallError(
            f"the coordinator at {endpoint} did not answer within {report.seconds(timeout)}; "
            f"last error: {details}\n"
            "  next: give it longer (--timeout), or check the address and the coordinator's log",
            Exit.TIMED_OUT,
        )
    return CallError(
        f"{endpoint} answered {code.name}: {details}\n"
        "  next: check that a coordinator of this version listens there, and its log",
        Exit.FAILED,
        code,
    )


@contextmanager
def connect(endpoint: str, timeout: float) -> Iterator[Client]:
    """A client for one command; a call that fails ends the command with its sentence and exit code."""
    try:
        client = Client(endpoint, timeout)
    except ValueError as error:
        fail(str(error), Exit.USAGE)
    try:
        yield client
    except CallError as error:
        fail(str(error), error.code)
    finally:
        client.close()
