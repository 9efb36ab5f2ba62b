"""RendezvousService: a stream for every node, and the closing of runs."""

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from muster.client.protocol import AGENT_RELAY_HEADER, RELAY_HEADER
from muster.service.core import views
from muster.service.core.vocabulary.effects import Evicted, NodeLeft, RunClosed
from muster.service.core.vocabulary.events import CloseRun, Disconnected, EvictNode, LeaveRendezvous
from muster.service.draining import DRAINING
from muster.service.driver import Driver
from muster.service.rpc import codec
from muster.service.rpc.call import Call
from muster.service.rpc.interceptors.guard import ADMISSION
from muster.service.rpc.push_stream import PushStream
from muster.service.wire import (
    barrier_names_to_pb,
    closed_to_pb,
    node_to_pb,
    nodes_to_pb,
    rendezvous_to_pb,
    stopped_to_pb,
)
from muster.v1 import rendezvous_pb2, rendezvous_pb2_grpc


class RendezvousServicer(rendezvous_pb2_grpc.RendezvousServiceServicer):
    """Serves ``muster.v1.RendezvousService``.

    Args:
        driver: takes the events.
        replicas: the addresses of all replicas, for nodes that join; empty: this is the only one.
        keepalive_ms: the keepalive for these nodes; 0: their own.
    """

    def __init__(
        self, driver: Driver, *, replicas: Callable[[], Sequence[str]] = tuple, keepalive_ms: int = 0
    ) -> None:
        self._driver = driver
        self._replicas = replicas
        self._keepalive_ms = keepalive_ms
        self._memberships: set[PushStream] = set()
        self._draining = False

    async def Join(  # noqa: N802
        self, request: rendezvous_pb2.JoinRequest, context: Any
    ) -> AsyncIterator[rendezvous_pb2.JoinResponse]:
        """Join a round, and keep the place while the stream is open."""
        if self._draining:
            raise DRAINING
        membership = PushStream(self._driver)
        self._memberships.add(membership)
        try:
            self._driver.submit(codec.join_rendezvous(membership.id, request))
            announced = False
            async for message in membership:
                if not announced and (addresses := self._replicas()):
                    yield rendezvous_pb2.JoinResponse(
                        replicas=rendezvous_pb2.Replicas(addresses=addresses, keepalive_ms=self._keepalive_ms)
                    )
                announced = True
                yield codec.join_response(message)
        finally:
            self._memberships.discard(membership)
            self._driver.disconnect(membership.id)
            ended = membership.ended or ADMISSION.get().has_ended
            reset = not ended and _is_agents_own(context.invocation_metadata() or ())
            self._driver.submit(Disconnected(membership.id, reset))

    async def Leave(  # noqa: N802
        self, request: rendezvous_pb2.LeaveRequest, context: Any
    ) -> rendezvous_pb2.LeaveResponse:
        """Give the node's place up."""
        with Call(self._driver, NodeLeft) as call:
            self._driver.submit(LeaveRendezvous(call.id, request.run_id, request.incarnation, request.reason))
            return rendezvous_pb2.LeaveResponse(had_place=(await call.answer()).had_place)

    async def Close(  # noqa: N802
        self, request: rendezvous_pb2.CloseRequest, context: Any
    ) -> rendezvous_pb2.CloseResponse:
        """Close the membership of a run for good, or show what that would affect."""
        affected = await self._driver.query(
            lambda core, _: views.closing(core, request.run_id, create=request.create)
        )
        closed, was_closed = affected.closed, affected.closed is not None
        stopped = None
        if not request.dry_run:
            with Call(self._driver, RunClosed) as call:
                self._driver.submit(
                    CloseRun(
                        call.id,
                        request.run_id,
                        request.by,
                        request.reason,
                        request.abort_barriers,
                        request.create,
                        request.even_if_stopped,
                    )
                )
                done = await call.answer()
            closed, was_closed, stopped = done.closed, done.was_closed, done.stopped
        return rendezvous_pb2.CloseResponse(
            closed=closed_to_pb(closed) if closed is not None else None,
            was_closed=was_closed,
            stopped=stopped_to_pb(stopped) if stopped is not None else None,
            waiting_nodes=[node_to_pb(node) for node in affected.waiting_nodes],
            nodes_in_round=affected.nodes_in_round,
            connected_processes=affected.connected_processes,
            open_barriers=barrier_names_to_pb(affected.open_barriers),
        )

    async def EvictNode(  # noqa: N802
        self, request: rendezvous_pb2.EvictNodeRequest, context: Any
    ) -> rendezvous_pb2.EvictNodeResponse:
        """Evict the agents of a machine for good, or show what that would affect."""
        affected = await self._driver.query(
            lambda core, now: views.node_eviction(
                core.run(request.run_id), request.node_name, now, only_if_spare=request.only_if_spare
            )
        )
        if not request.dry_run:
            with Call(self._driver, Evicted) as call:
                self._driver.submit(
                    EvictNode(
                        call.id,
                        request.run_id,
                        request.node_name,
                        request.by,
                        request.reason,
                        request.only_if_spare,
                    )
                )
                await call.answer()
        return rendezvous_pb2.EvictNodeResponse(evicted=nodes_to_pb(affected.nodes), spares=affected.spares)

    async def Get(  # noqa: N802
        self, request: rendezvous_pb2.RendezvousServiceGetRequest, context: Any
    ) -> rendezvous_pb2.RendezvousServiceGetResponse:
        """Show the rendezvous of a run."""
        view = await self._driver.query(lambda core, now: views.rendezvous(core.run(request.run_id), now))
        return rendezvous_pb2.RendezvousServiceGetResponse(rendezvous=rendezvous_to_pb(view))

    def drain(self) -> None:
        """End every stream. The nodes come back to their places."""
        self._draining = True
        for membership in list(self._memberships):
            membership.end(DRAINING)


def _is_agents_own(metadata: Iterable[tuple[str, str | bytes]]) -> bool:
    """Return whether a connection ends with the agent's process: without a relay, or with one inside."""
    names = {name for name, _ in metadata}
    return RELAY_HEADER not in names or AGENT_RELAY_HEADER in names
