"""LocalCheckpointService: the keepers of local checkpoints, and what their ranks resume from."""

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from muster.service import local_wire
from muster.service.core.local import views
from muster.service.core.vocabulary.events import Disconnected
from muster.service.core.vocabulary.local import LocalCommitted, Permitted, Recovered, ReportTaken
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.draining import DRAINING
from muster.service.driver import Driver
from muster.service.rpc import codec
from muster.service.rpc.call import Call, LongPolls
from muster.service.rpc.push_stream import PushStream
from muster.v1 import local_pb2 as pb
from muster.v1 import local_pb2_grpc, rendezvous_pb2


class LocalCheckpointServicer(local_pb2_grpc.LocalCheckpointServiceServicer):
    """Serves ``muster.v1.LocalCheckpointService``.

    Args:
        driver: takes the events.
        replicas: the addresses of all replicas, for keepers; empty: this is the only one.
        keepalive_ms: the keepalive for these keepers; 0: their own.
    """

    def __init__(
        self, driver: Driver, *, replicas: Callable[[], Sequence[str]] = tuple, keepalive_ms: int = 0
    ) -> None:
        self._driver = driver
        self._replicas = replicas
        self._keepalive_ms = keepalive_ms
        self._keepers: set[PushStream] = set()
        self._polls = LongPolls(driver)
        self._draining = False

    async def Keep(self, request: pb.KeepRequest, context: Any) -> AsyncIterator[pb.KeepResponse]:  # noqa: N802
        """Hold a keeper's place, and push its peers and orders."""
        if self._draining:
            raise DRAINING
        codec.check_version(request.protocol_version)
        stream = PushStream(self._driver)
        self._keepers.add(stream)
        try:
            self._driver.submit(local_wire.keep_from_pb(stream.id, request, secrets.token_urlsafe(32)))
            if addresses := self._replicas():
                replicas = rendezvous_pb2.Replicas(addresses=addresses, keepalive_ms=self._keepalive_ms)
                yield pb.KeepResponse(replicas=replicas)
            async for message in stream:
                yield local_wire.keep_response(message)
        finally:
            self._keepers.discard(stream)
            self._driver.disconnect(stream.id)
            self._driver.submit(Disconnected(stream.id))

    async def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportResponse:  # noqa: N802
        """Take in what has changed on a keeper."""
        with Call(self._driver, ReportTaken) as call:
            self._driver.submit(local_wire.report_from_pb(call.id, request))
            await call.answer()
        return pb.ReportResponse()

    async def Commit(  # noqa: N802
        self, request: pb.LocalCheckpointServiceCommitRequest, context: Any
    ) -> pb.LocalCheckpointServiceCommitResponse:
        """Make a checkpoint, and wait for its level."""
        with self._polls.open(LocalCommitted) as call:
            try:
                event = local_wire.commit_from_pb(call.id, request)
            except ValueError as error:
                raise Refusal(Reason.INVALID_ARGUMENT, f"wait_for: {error}.", field="wait_for") from None
            self._driver.submit(event)
            return local_wire.committed_to_pb(await call.answer())

    async def Permit(self, request: pb.PermitRequest, context: Any) -> pb.PermitResponse:  # noqa: N802
        """Permit a keeper to commit a checkpoint in shared storage."""
        with Call(self._driver, Permitted) as call:
            self._driver.submit(local_wire.permit_from_pb(call.id, request))
            return local_wire.permitted_to_pb(await call.answer())

    async def Recover(self, request: pb.RecoverRequest, context: Any) -> pb.RecoverResponse:  # noqa: N802
        """Answer what all ranks resume from, when it is decided."""
        with self._polls.open(Recovered) as call:
            self._driver.submit(local_wire.recover_from_pb(call.id, request))
            return local_wire.recovered_to_pb(await call.answer())

    async def List(  # noqa: N802
        self, request: pb.LocalCheckpointServiceListRequest, context: Any
    ) -> pb.LocalCheckpointServiceListResponse:
        """Show the local checkpoints and the keepers of a run."""
        view = await self._driver.query(
            lambda core, now: views.local_tier(core.run(request.run_id).local, now)
        )
        return local_wire.list_response(view)

    def drain(self) -> None:
        """End every stream and waiting call. The keepers and ranks come back."""
        self._draining = True
        self._polls.drain()
        for stream in list(self._keepers):
            stream.end(DRAINING)
