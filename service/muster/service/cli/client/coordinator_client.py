"""The coordinator as the command sees it: calls that return, or fail with a sentence and an exit code."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar, cast

import grpc

from muster.client.calls import DRAINING, NOT_LEADER, channel_options, reason_of, search_on
from muster.client.replicas import Replicas, Search, Target
from muster.service.address import Address
from muster.service.cli.client.credentials import given
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
    local_pb2,
    local_pb2_grpc,
    rendezvous_pb2,
    rendezvous_pb2_grpc,
    run_pb2,
    run_pb2_grpc,
)

if TYPE_CHECKING:
    Request = TypeVar("Request")
    Response = TypeVar("Response")

LAST_CALL = 0.2
"""Seconds before the end of ``--timeout`` at which the last call is made."""
MAX_CONNECT_MS = 20_000
"""Milliseconds for one attempt to connect to the only coordinator; less with a shorter timeout."""
RECONNECT = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 2_000)]
STREAM_LASTED = 5.0
"""Seconds after which a stream without messages is a leader's: a standby refuses earlier."""
NEVER_SENT = ("failed to connect", "DNS resolution failed", "errors resolving")
"""The details of a call that reached no coordinator start with one of these."""

EXITS = {
    Reason.NO_OPEN_BARRIER.name: Exit.CLOSED,
    Reason.NO_SAVE_ASKED.name: Exit.CLOSED,
    Reason.COORDINATOR_DRAINING.name: Exit.UNREACHABLE,
    Reason.NOT_LEADER.name: Exit.UNREACHABLE,
}
"""The exit codes of refusals; the others are plain failures."""


class CallError(Exception):
    """A call that failed.

    Args:
        message: what happened, why, and what to do next.
        code: the exit code that stands for it.
        status: what the call ended with.
        reason: the name of the reason of a refusal; empty: the call was not refused.
    """

    def __init__(
        self, message: str, code: Exit, status: grpc.StatusCode | None = None, reason: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = status
        self.reason = reason


class _Services:
    """A channel to one coordinator, and the services on it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.runs = run_pb2_grpc.RunServiceStub(channel)
        self.barriers = barrier_pb2_grpc.BarrierServiceStub(channel)
        self.coordinator = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        self.rendezvous = rendezvous_pb2_grpc.RendezvousServiceStub(channel)
        self.insight = insight_pb2_grpc.InsightServiceStub(channel)
        self.local = local_pb2_grpc.LocalCheckpointServiceStub(channel)


class Client:
    """A connection to the coordinator, whichever of its replicas leads.

    Args:
        endpoint: ``HOST:PORT``, or several with commas between.
        timeout: seconds that each request may take, at all of them together.

    Raises:
        ValueError: the endpoint is no such text.
    """

    def __init__(self, endpoint: str, timeout: float) -> None:
        addresses = (str(Address.parse(part.strip())) for part in endpoint.split(","))
        self.endpoint = ",".join(dict.fromkeys(addresses))
        self._replicas = Replicas(self.endpoint)
        self._timeout = timeout
        self._services: dict[str, _Services] = {}

    def close(self) -> None:
        """Close the connections."""
        for services in self._services.values():
            services.channel.close()

    def status(self) -> coordinator_pb2.StatusResponse:
        """Return the coordinator's status."""
        return self._call(lambda services: services.coordinator.Status, coordinator_pb2.StatusRequest())

    def replicas(self) -> coordinator_pb2.ReplicasResponse:
        """Return the replicas of the coordinator."""
        return self._call(lambda services: services.coordinator.Replicas, coordinator_pb2.ReplicasRequest())

    def runs(self) -> run_pb2.RunServiceListResponse:
        """Return every run."""
        return self._call(lambda services: services.runs.List, run_pb2.RunServiceListRequest())

    def run(self, run_id: str) -> run_pb2.RunServiceGetResponse:
        """Return one run."""
        return self._call(lambda services: services.runs.Get, run_pb2.RunServiceGetRequest(run_id=run_id))

    def members(self, run_id: str) -> run_pb2.MembersResponse:
        """Return the processes of a run."""
        return self._call(lambda services: services.runs.Members, run_pb2.MembersRequest(run_id=run_id))

    def watch_runs(self, run_id: str) -> Iterator[run_pb2.Run]:
        """Yield each run, or the named one, now and after each change."""
        shown: dict[str, run_pb2.Run] = {}
        for response in self._stream(
            lambda services: services.runs.Watch, run_pb2.WatchRequest(run_id=run_id)
        ):
            # Another leader starts again with all of them.
            if shown.get(response.run.run_id) != response.run:
                shown[response.run.run_id] = response.run
                yield response.run

    def barrier(
        self, run_id: str, prefix: str, sequence: int | None
    ) -> barrier_pb2.BarrierServiceGetResponse:
        """Return one barrier; without a sequence the open one, or else the last one decided."""
        return self._call(
            lambda services: services.barriers.Get,
            barrier_pb2.BarrierServiceGetRequest(run_id=run_id, prefix=prefix, sequence=sequence),
        )

    def barriers(self, run_id: str, history: int) -> barrier_pb2.BarrierServiceListResponse:
        """Return the open and the newest decided barriers of a run, or of all."""
        return self._call(
            lambda services: services.barriers.List,
            barrier_pb2.BarrierServiceListRequest(run_id=run_id, history=history),
        )

    def abort(self, run_id: str, prefix: str, reason: str, sequence: int | None) -> barrier_pb2.AbortResponse:
        """End the open barrier of a group."""
        return self._call(
            lambda services: services.barriers.Abort,
            barrier_pb2.AbortRequest(run_id=run_id, prefix=prefix, reason=reason, sequence=sequence),
            unknown="whether the barrier was aborted is unknown; see: "
            f"{report.command('describe barrier', run_id, prefix)}",
        )

    def rendezvous(self, run_id: str) -> rendezvous_pb2.RendezvousServiceGetResponse:
        """Return the rendezvous of a run."""
        return self._call(
            lambda services: services.rendezvous.Get,
            rendezvous_pb2.RendezvousServiceGetRequest(run_id=run_id),
        )

    def local_checkpoints(self, run_id: str) -> local_pb2.LocalCheckpointServiceListResponse:
        """Return the local checkpoints and the keepers of a run."""
        return self._call(
            lambda services: services.local.List,
            local_pb2.LocalCheckpointServiceListRequest(run_id=run_id),
        )

    def stacks(self, request: insight_pb2.StacksRequest) -> insight_pb2.StacksResponse:
        """Return the stacks of the processes of a run."""
        return self._call(lambda services: services.insight.Stacks, request)

    def close_run(self, request: rendezvous_pb2.CloseRequest) -> rendezvous_pb2.CloseResponse:
        """End the membership of a run, or show the processes that this would affect."""
        unknown = (
            f"whether the run was closed is unknown; see: {report.command('describe run', request.run_id)}"
        )
        return self._call(
            lambda services: services.rendezvous.Close, request, unknown="" if request.dry_run else unknown
        )

    def evict(self, request: run_pb2.EvictRequest) -> run_pb2.EvictResponse:
        """Evict the processes of a rank, or show the processes that this would affect."""
        unknown = (
            "whether the rank was evicted is unknown; see: "
            f"{report.command('describe member', request.run_id, request.rank)}"
        )
        return self._call(
            lambda services: services.runs.Evict, request, unknown="" if request.dry_run else unknown
        )

    def evict_node(self, request: rendezvous_pb2.EvictNodeRequest) -> rendezvous_pb2.EvictNodeResponse:
        """Evict the agents of a machine, or show those that this would affect."""
        unknown = (
            f"whether the node was evicted is unknown; see: {report.command('get rounds', request.run_id)}"
        )
        return self._call(
            lambda services: services.rendezvous.EvictNode,
            request,
            unknown="" if request.dry_run else unknown,
        )

    def request_save(self, request: run_pb2.RequestSaveRequest) -> run_pb2.RequestSaveResponse:
        """Ask all ranks of a run to save at one step; a repeated request changes nothing."""
        return self._call(lambda services: services.runs.RequestSave, request)

    def drain_node(self, request: run_pb2.DrainNodeRequest) -> run_pb2.DrainNodeResponse:
        """Ask all runs on a node to save; a repeated request changes nothing."""
        return self._call(lambda services: services.runs.DrainNode, request)

    def cancel_save(self, request: run_pb2.CancelSaveRequest) -> run_pb2.CancelSaveResponse:
        """Withdraw the request to save."""
        unknown = (
            f"whether it was withdrawn is unknown; see: {report.command('describe run', request.run_id)}"
        )
        return self._call(lambda services: services.runs.CancelSave, request, unknown=unknown)

    def forget(self, request: run_pb2.ForgetRequest) -> run_pb2.ForgetResponse:
        """Remove a run, or show the processes that this would affect."""
        unknown = (
            f"whether the run was forgotten is unknown; see: {report.command('describe run', request.run_id)}"
        )
        return self._call(
            lambda services: services.runs.Forget, request, unknown="" if request.dry_run else unknown
        )

    def _call(
        self,
        method: "Callable[[_Services], grpc.UnaryUnaryMultiCallable[Request, Response]]",
        request: "Request",
        *,
        unknown: str = "",
    ) -> "Response":
        """Call the leader.

        Args:
            method: the method.
            request: its request.
            unknown: says what is unknown if a request was sent and not answered; empty: it changes nothing,
                and may be repeated.
        """
        deadline = time.monotonic() + self._timeout
        search = Search(self._replicas)
        while True:
            services, left = self._services_at(search.begin()), max(deadline - time.monotonic(), 0.0)
            try:
                response = method(services)(request, timeout=left, metadata=search.metadata)
            except grpc.RpcError as error:
                self._wait_for_next(search, error, deadline, unknown)
            else:
                search.answered()
                return response

    def _stream(
        self,
        method: "Callable[[_Services], grpc.UnaryStreamMultiCallable[Request, Response]]",
        request: "Request",
    ) -> "Iterator[Response]":
        """Listen to the leader; if it is lost, to the next one."""
        search, deadline = Search(self._replicas), time.monotonic() + self._timeout
        while True:
            services, began = self._services_at(search.begin()), time.monotonic()
            try:
                for response in method(services)(request, metadata=search.metadata):
                    search.answered()
                    began = float("-inf")
                    yield response
                return
            except grpc.RpcError as error:
                if time.monotonic() - began > STREAM_LASTED:
                    # The leader may have had nothing to send.
                    search.answered()
                    deadline = time.monotonic() + self._timeout
                self._wait_for_next(search, error, deadline)

    def _services_at(self, target: Target) -> _Services:
        if target.address not in self._services:
            if not self._replicas.several:
                # The call's own timeout ends an attempt to connect first.
                target = replace(target, connect_timeout_ms=MAX_CONNECT_MS)
            mine = given()
            mine.check()
            options = [*channel_options(target), *RECONNECT]
            self._services[target.address] = _Services(
                mine.open_channel(target.address, options, target.tls_name)
            )
        return self._services[target.address]

    def _wait_for_next(
        self, search: Search, error: grpc.RpcError, deadline: float, unknown: str = ""
    ) -> None:
        """Continue the search after a call that failed, and wait until its next call.

        Raises:
            CallError: there is no further call to make.
        """
        # What the synchronous gRPC raises is the call as well; its types do not say so.
        call = cast(grpc.Call, error)
        details = call.details() or "no details"
        if not _may_be_repeated(call, details, resend=not unknown):
            raise self._explained(search, call, unknown) from error
        turns = search.turns
        pause = search_on(search, error, str(given().fault(details) or details))
        if search.turns > turns and not search.met_standby:
            if self._replicas.several:
                raise self._no_leader(search) from error
            raise self._explained(search, call, unknown) from error
        left = deadline - LAST_CALL - time.monotonic()
        if left <= 0:
            raise self._no_leader(search) from error
        time.sleep(min(pause, left))

    def _explained(self, search: Search, call: grpc.Call, unknown: str) -> CallError:
        if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and search.met_standby and not search.followed:
            # A standby may have held the call until the deadline.
            search.ran_out(call.details() or "no details")
            return self._no_leader(search)
        explained = explain(call, search.target.address, self._timeout)
        if unknown and (explained.code is Exit.TIMED_OUT or self._replicas.several) and not reason_of(call):
            # Without this, an operator might repeat the command, and abort a newer barrier or run.
            return CallError(f"{explained}\n  {unknown}", explained.code)
        return explained

    def _no_leader(self, search: Search) -> CallError:
        """Return the error for a search that found no leader, with the last error of each address."""
        words = "".join(
            f"\n  {address}: {report.printable(why)}" for address, why in search.last_errors.items()
        )
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


def _may_be_repeated(call: grpc.Call, details: str, *, resend: bool) -> bool:
    """Return whether another coordinator may get a request that failed.

    Args:
        call: the call.
        details: how it ended, for people.
        resend: whether the request may be repeated although it may have been carried out.
    """
    if reason := reason_of(call):
        return reason in (NOT_LEADER, DRAINING)
    return call.code() is grpc.StatusCode.UNAVAILABLE and (resend or details.startswith(NEVER_SENT))


def explain(error: grpc.Call, endpoint: str, timeout: float) -> CallError:
    """Return the error that a failed call is for the user.

    Args:
        error: the call, which has its status.
        endpoint: the address that was called.
        timeout: how many seconds the coordinator had.
    """
    details = report.printable(error.details() or "no details")
    reason = reason_of(error)
    if reason:
        return CallError(details, EXITS.get(reason, Exit.FAILED), reason=reason)
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
    """Open a client for one command; a failed call ends the command with its sentence and exit code."""
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
