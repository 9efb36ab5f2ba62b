"""What ranks ask the coordinator about local checkpoints."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc
from google.protobuf.message import Message

from muster.checkpoint.committed import SaveAttempt
from muster.client.calls import ELSEWHERE, explain, reason_of
from muster.client.errors import EnvironmentValueError
from muster.client.replicas import Search, Target, replicas_of
from muster.v1 import local_pb2 as pb
from muster.v1 import local_pb2_grpc
from muster.worker.errors import ConnectError, MusterError, RefusedError
from muster.worker.saves.local.level import Level
from muster.worker.transport.channel import open_channel
from muster.worker.transport.fork_guard import GrpcUsage
from muster.worker.transport.outage_log import OutageLog
from muster.worker.transport.unary import Method, Response, ask_leader

logger = logging.getLogger(__name__)

USAGE = "a call about local checkpoints"
"""What this process uses gRPC for."""
ATTEMPT = 60.0
"""Seconds for one call. A coordinator that is stopped holds a call for no longer."""
RECOVER_ATTEMPT = 5.0
"""Seconds for one call that waits for a decision."""
PAUSE = 0.5
"""Seconds between two attempts."""
NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
"""How a call ends when the connection breaks, the coordinator stops, or it says nothing in time."""


class LocalCheckpointCalls:
    """Calls to the coordinator. All may be sent again, and are, until the timeout is over.

    Args:
        endpoint: the coordinator's addresses.
        run_id: the training job.
    """

    def __init__(self, endpoint: str, run_id: str) -> None:
        self._endpoint = endpoint
        self._run_id = run_id

    def commit(
        self, checkpoint: pb.LocalCheckpoint, keeper_id: str, wait_for: Level, timeout: float
    ) -> Level:
        """Make a local checkpoint that all ranks have written, for good.

        Args:
            checkpoint: it.
            keeper_id: the keeper that has its manifest.
            wait_for: the level to wait for.
            timeout: seconds.

        Returns:
            Its level.

        Raises:
            ConnectError: it is not known whether it is made, or it does not have that level yet.
            RefusedError: the coordinator refused.
        """
        request = pb.LocalCheckpointServiceCommitRequest(
            run_id=self._run_id,
            checkpoint=checkpoint,
            keeper_id=keeper_id,
            wait_for=pb.DurabilityLevel.ValueType(wait_for),
        )
        what = f"make step {checkpoint.step} a local checkpoint"
        if wait_for > Level.LOCAL:
            what += f" that is {wait_for}"
        response: pb.LocalCheckpointServiceCommitResponse = self._ask(
            lambda channel: _stub(channel).Commit, request, timeout, what
        )
        return Level(response.level)

    def commit_shared(
        self, checkpoint: pb.LocalCheckpoint, persisted_as: str, timeout: float
    ) -> Sequence[pb.LocalCheckpoint]:
        """Ask whether a checkpoint may be committed in shared storage, or tell that it is.

        Args:
            checkpoint: it.
            persisted_as: where it is committed; empty: it is not yet.
            timeout: seconds.

        Returns:
            Older checkpoints of which it must be made sure first that they are committed, or never will be.

        Raises:
            ConnectError: the coordinator does not answer in time.
            RefusedError: the coordinator refused.
        """
        request = pb.LocalCheckpointServiceCommitRequest(
            run_id=self._run_id, checkpoint=checkpoint, persisted_as=persisted_as
        )
        what = f"{'note' if persisted_as else 'permit'} step {checkpoint.step} in shared storage"
        response: pb.LocalCheckpointServiceCommitResponse = self._ask(
            lambda channel: _stub(channel).Commit, request, timeout, what
        )
        return response.unsettled

    def recover(
        self,
        generation: int,
        number: int,
        world_size: int,
        timeout: float,
        before: Callable[[], None] = lambda: None,
        *,
        absent: Sequence[SaveAttempt] = (),
        without_local: bool = False,
    ) -> pb.RecoverResponse:
        """Return the decision what to resume from.

        Args:
            generation: of the run.
            number: of the decision.
            world_size: the number of ranks.
            timeout: seconds.
            before: called before each of several calls. The decision waits for this rank's keeper, which may
                have ended meanwhile.
            absent: what the last decision named, and is not in shared storage.
            without_local: whether it must name no local checkpoint.

        Raises:
            ConnectError: there is no decision in time.
            RefusedError: the coordinator refused.
        """
        request = pb.RecoverRequest(
            run_id=self._run_id,
            generation=generation,
            number=number,
            world_size=world_size,
            absent=[pb.Attempt(generation=one.generation, number=one.number) for one in absent],
            without_local=without_local,
        )
        response: pb.RecoverResponse = self._ask(
            lambda channel: _stub(channel).Recover,
            request,
            timeout,
            "decide what to resume from",
            RECOVER_ATTEMPT,
            before,
        )
        return response

    def _ask(
        self,
        method: Method[Response],
        request: Message,
        timeout: float,
        what: str,
        attempt: float = ATTEMPT,
        before: Callable[[], None] = lambda: None,
    ) -> Response:
        deadline = time.monotonic() + timeout
        search, outage = Search(replicas_of(self._endpoint)), OutageLog(self._endpoint)
        while True:
            before()
            left, waits = max(deadline - time.monotonic(), 0.0), False
            try:
                return ask_leader(search, _channel, method, request, min(left, attempt), wait=True)
            except EnvironmentValueError as error:
                why = str(error)  # Files that are being replaced may be unusable for a moment.
            except grpc.RpcError as error:
                why = search.said or explain(error)
                if (refused := _refused(error, self._endpoint)) is not None:
                    raise refused from None
                # A call that ran out of time has waited: its answer may come at any moment.
                waits = deadline - time.monotonic() <= left - attempt
            if time.monotonic() + PAUSE >= deadline:
                raise ConnectError(
                    f"the coordinator at {self._endpoint} did not {what} within {timeout:g} s; last error: "
                    f"{why}. See muster get checkpoints, and that it runs: muster get runs."
                )
            if not waits:
                outage.failed(why)
                time.sleep(PAUSE)


def _refused(error: grpc.RpcError, endpoint: str) -> MusterError | None:
    """Return the error for a refusal; None if the call may be sent again."""
    reason = reason_of(error)
    if reason:
        return None if reason in ELSEWHERE else RefusedError(str(error.details()), reason)
    if error.code() in NO_ANSWER:
        return None
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return RefusedError(
            f"{endpoint} does not serve muster.v1.LocalCheckpointService: the coordinator is of an older "
            "version. Upgrade it, or save without local=.",
            "UNIMPLEMENTED",
        )
    return RefusedError(f"the coordinator at {endpoint} failed: {explain(error)}.")


@contextmanager
def _channel(target: Target) -> Iterator[grpc.Channel]:
    """A channel for one call."""
    with GrpcUsage(USAGE), open_channel(target) as channel:
        yield channel


def _stub(channel: grpc.Channel) -> local_pb2_grpc.LocalCheckpointServiceStub:
    return local_pb2_grpc.LocalCheckpointServiceStub(channel)
