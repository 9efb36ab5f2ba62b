"""The coordinator as the command sees it: calls that answer, or fail with a sentence and an exit code."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

import grpc
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_status import rpc_status

from muster.service.address import Address
from muster.service.cli.credentials import given
from muster.service.cli.failure import Exit, fail
from muster.service.core import report
from muster.service.core.refusal import Reason
from muster.v1 import (
    barrier_pb2,
    barrier_pb2_grpc,
    coordinator_pb2,
    coordinator_pb2_grpc,
    rendezvous_pb2,
    rendezvous_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
)

if TYPE_CHECKING:
    Request = TypeVar("Request")
    Response = TypeVar("Response")

KEEPALIVE_MS = 10_000
CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    # A watch waits without a deadline: only a ping without an answer tells that the other side is gone.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_MS),
    ("grpc.http2.max_pings_without_data", 0),
]

EXITS = {
    Reason.NO_OPEN_BARRIER.name: Exit.CLOSED,
    Reason.COORDINATOR_DRAINING.name: Exit.UNREACHABLE,
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


class Client:
    """A connection to one coordinator.

    Args:
        endpoint: ``HOST:PORT``.
        timeout: seconds that each call may take.
    """

    def __init__(self, endpoint: str, timeout: float) -> None:
        self.endpoint = endpoint
        self._timeout = timeout
        self._channel = given().open_channel(endpoint, CHANNEL_OPTIONS)
        self._runs = run_pb2_grpc.RunServiceStub(self._channel)
        self._barriers = barrier_pb2_grpc.BarrierServiceStub(self._channel)
        self._coordinator = coordinator_pb2_grpc.CoordinatorServiceStub(self._channel)
        self._rendezvous = rendezvous_pb2_grpc.RendezvousServiceStub(self._channel)

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def status(self) -> coordinator_pb2.StatusResponse:
        """How the coordinator is."""
        return self._call(self._coordinator.Status, coordinator_pb2.StatusRequest())

    def runs(self) -> run_pb2.RunServiceListResponse:
        """Every run."""
        return self._call(self._runs.List, run_pb2.RunServiceListRequest())

    def run(self, run_id: str) -> run_pb2.RunServiceGetResponse:
        """One run."""
        return self._call(self._runs.Get, run_pb2.RunServiceGetRequest(run_id=run_id))

    def members(self, run_id: str) -> run_pb2.MembersResponse:
        """The processes of a run."""
        return self._call(self._runs.Members, run_pb2.MembersRequest(run_id=run_id))

    def watch_runs(self, run_id: str) -> Iterator[run_pb2.Run]:
        """Each run, or the one named, now and whenever it changes."""
        try:
            for response in self._runs.Watch(run_pb2.WatchRequest(run_id=run_id)):
                yield response.run
        except grpc.RpcError as error:
            raise self._explain(error) from error

    def barrier(
        self, run_id: str, prefix: str, sequence: int | None
    ) -> barrier_pb2.BarrierServiceGetResponse:
        """One barrier; without a sequence the open one, or else the last one decided."""
        return self._call(
            self._barriers.Get,
            barrier_pb2.BarrierServiceGetRequest(run_id=run_id, prefix=prefix, sequence=sequence),
        )

    def barriers(self, run_id: str, history: int) -> barrier_pb2.BarrierServiceListResponse:
        """The open and the newest decided barriers of a run, or of all."""
        return self._call(
            self._barriers.List, barrier_pb2.BarrierServiceListRequest(run_id=run_id, history=history)
        )

    def abort(self, run_id: str, prefix: str, reason: str, sequence: int | None) -> barrier_pb2.AbortResponse:
        """End the open barrier of a group."""
        return self._call(
            self._barriers.Abort,
            barrier_pb2.AbortRequest(run_id=run_id, prefix=prefix, reason=reason, sequence=sequence),
            unknown="whether the barrier was aborted is unknown; see: "
            f"{report.command('describe barrier', run_id, prefix)}",
        )

    def rendezvous(self, run_id: str) -> rendezvous_pb2.RendezvousServiceGetResponse:
        """The rendezvous of a run."""
        return self._call(self._rendezvous.Get, rendezvous_pb2.RendezvousServiceGetRequest(run_id=run_id))

    def close_run(self, request: rendezvous_pb2.CloseRequest) -> rendezvous_pb2.CloseResponse:
        """End the membership of a run, or see whom that would affect."""
        unknown = (
            f"whether the run was closed is unknown; see: {report.command('describe run', request.run_id)}"
        )
        return self._call(self._rendezvous.Close, request, unknown="" if request.dry_run else unknown)

    def evict(self, request: run_pb2.EvictRequest) -> run_pb2.EvictResponse:
        """Send the processes of a rank away, or see whom that would affect."""
        unknown = (
            "whether the rank was evicted is unknown; see: "
            f"{report.command('describe member', request.run_id, request.rank)}"
        )
        return self._call(self._runs.Evict, request, unknown="" if request.dry_run else unknown)

    def forget(self, request: run_pb2.ForgetRequest) -> run_pb2.ForgetResponse:
        """Remove a run, or see whom that would affect."""
        unknown = (
            f"whether the run was forgotten is unknown; see: {report.command('describe run', request.run_id)}"
        )
        return self._call(self._runs.Forget, request, unknown="" if request.dry_run else unknown)

    def _call(
        self,
        method: "grpc.UnaryUnaryMultiCallable[Request, Response]",
        request: "Request",
        *,
        unknown: str = "",
    ) -> "Response":
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            explained = self._explain(error)
            if unknown and explained.code is Exit.TIMED_OUT:
                # Without this an operator would simply repeat the command, and might end what came since.
                explained = CallError(f"{explained}\n  {unknown}", explained.code)
            raise explained from error

    def _explain(self, error: grpc.RpcError) -> CallError:
        # What the synchronous gRPC raises is the call as well; its types do not say so.
        return explain(cast(grpc.Call, error), self.endpoint, self._timeout)


def explain(error: grpc.Call, endpoint: str, timeout: float) -> CallError:
    """What a failed call means for the caller.

    Args:
        error: the call, which knows its status.
        endpoint: whom it called.
        timeout: how many seconds the coordinator had.
    """
    details = report.printable(error.details() or "no details")
    reason = _reason(error)
    if reason is not None:
        return CallError(details, EXITS.get(reason, Exit.FAILED))
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        if fault := given().fault(details):
            return CallError(f"the coordinator at {endpoint} cannot be reached: {fault}", Exit.UNREACHABLE)
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


def _reason(error: grpc.Call) -> str | None:
    """The reason of the coordinator's refusal; None if it was not the coordinator that refused."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:
        return None
    info = ErrorInfo()
    for detail in status.details if status is not None else ():
        if detail.Unpack(info):
            return str(info.reason)
    return None


@contextmanager
def connect(endpoint: str, timeout: float) -> Iterator[Client]:
    """A client for one command; a call that fails ends the command with its sentence and exit code."""
    try:
        address = Address.parse(endpoint)
    except ValueError as error:
        fail(str(error), Exit.USAGE)
    client = Client(str(address), timeout)
    try:
        yield client
    except CallError as error:
        fail(str(error), error.code)
    finally:
        client.close()
