"""A small ``LocalCheckpointService`` on a real socket: a test gives the orders, and sees the reports."""

import queue
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from lab.authority import Authority, Pair
from lab.patience import until
from lab.processes.coordinator import free_port
from muster.v1 import local_pb2 as pb
from muster.v1 import local_pb2_grpc
from tests.support.keeping.checkpoints import MadeCheckpoint

TOKEN = "a token of peers"
ASKED = 1
"""What all orders ask to confirm."""
Holdings = dict[tuple[int, int], pb.Holding]


class FakeKeeper:
    """What a keeper has said on its stream, and what it is to hear."""

    def __init__(self, request: pb.KeepRequest) -> None:
        self.request = request
        self.attachment = request.attachment
        self.holdings: Holdings = {_key(one.attempt): one for one in request.holdings}
        self.disk = request.disk
        self.confirmed = 0
        self.transfers = {one.url: one for one in request.transfers}
        self.outbox: queue.SimpleQueue[pb.KeepResponse | None] = queue.SimpleQueue()


class FakeService(local_pb2_grpc.LocalCheckpointServiceServicer):
    """It decides nothing: a test gives the orders.

    Args:
        tls: the authority of the keepers' certificates, and its own certificate; default: no TLS.
    """

    def __init__(self, tls: tuple[Authority, Pair] | None = None) -> None:
        self._tls = tls
        self.port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self.keepers: dict[str, FakeKeeper] = {}
        self._urls: dict[str, str] = {}
        """Includes keepers with a closed stream."""
        self.orders: dict[str, pb.Orders] = {}
        """By keeper, the last orders: the first that its next stream hears."""
        self.refusing = False
        """Whether reports are refused."""
        self.permits: list[tuple[int, int]] = []
        """The attempts for which keepers have asked for a permit."""
        self.permits_nothing = False
        self.unsettled: list[pb.LocalCheckpoint] = []
        """What each permit names."""
        self._lock = threading.Lock()
        self._server: grpc.Server | None = None

    def __enter__(self) -> "FakeService":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> "FakeService":
        """Listen."""
        self._server = grpc.server(ThreadPoolExecutor(32), options=[("grpc.so_reuseport", 0)])
        local_pb2_grpc.add_LocalCheckpointServiceServicer_to_server(self, self._server)
        if self._tls is None:
            assert self._server.add_insecure_port(self.endpoint) == self.port
        else:
            authority, pair = self._tls
            credentials = grpc.ssl_server_credentials(
                [(pair.key.read_bytes(), pair.cert.read_bytes())],
                authority.ca.read_bytes(),
                require_client_auth=True,
            )
            assert self._server.add_secure_port(self.endpoint, credentials) == self.port
        self._server.start()
        return self

    def stop(self) -> None:
        """End all streams; what keepers have said is forgotten."""
        if self._server is not None:
            for keeper in list(self.keepers.values()):
                keeper.outbox.put(None)
            self._server.stop(0).wait()
            self._server = None
            self.keepers.clear()

    # ------------------------------------------------------------------ the service

    def Keep(self, request: pb.KeepRequest, context: Any) -> Iterator[pb.KeepResponse]:  # noqa: N802
        keeper = FakeKeeper(request)
        with self._lock:
            self.keepers[request.keeper.id] = keeper
            self._urls[request.keeper.id] = request.keeper.url

        def end() -> None:
            # Not after the loop: if the stream ends while gRPC sends, gRPC does not resume the generator.
            with self._lock:
                if self.keepers.get(request.keeper.id) is keeper:
                    del self.keepers[request.keeper.id]
            keeper.outbox.put(None)

        if not context.add_callback(end):
            end()
        self._push_peers()
        orders = self.orders.get(request.keeper.id, pb.Orders(confirm=ASKED))
        keeper.outbox.put(pb.KeepResponse(orders=orders))
        while (response := keeper.outbox.get()) is not None:
            yield response

    def Report(self, request: pb.ReportRequest, context: Any) -> pb.ReportResponse:  # noqa: N802
        keeper = self.keepers.get(request.keeper_id)
        if keeper is None or self.refusing:
            context.abort(grpc.StatusCode.UNAVAILABLE, "no stream is open")
        assert keeper is not None
        with self._lock:
            if request.HasField("attachment"):
                keeper.attachment = request.attachment
            if request.HasField("disk"):
                keeper.disk = request.disk
            keeper.confirmed = request.confirmed
            if request.transfers:
                keeper.transfers = {one.url: one for one in request.transfers}
            keeper.holdings |= {_key(one.attempt): one for one in request.holdings}
        self._push_peers()
        return pb.ReportResponse()

    def Permit(self, request: pb.PermitRequest, context: Any) -> pb.PermitResponse:  # noqa: N802
        self.permits.append(_key(request.attempt))
        if self.permits_nothing:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "a recovery has passed over it")
        return pb.PermitResponse(unsettled=self.unsettled)

    def Commit(self, request: Any, context: Any) -> Any:  # noqa: N802
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "a keeper does not ask for it")

    Recover = List = Commit

    def _push_peers(self) -> None:
        with self._lock:
            keepers = dict(self.keepers)
        locations = [
            pb.Location(url=one.request.keeper.url, ranks=one.attachment.ranks) for one in keepers.values()
        ]
        for keeper in keepers.values():
            keeper.outbox.put(pb.KeepResponse(peers=pb.Peers(generation=1, token=TOKEN, keepers=locations)))

    # ------------------------------------------------------------------ tests

    def push(self, keeper_id: str, *orders: pb.Order, forget_before: tuple[int, int] = (0, 0)) -> None:
        """Give a keeper its orders."""
        before = pb.Attempt(generation=forget_before[0], number=forget_before[1])
        self.orders[keeper_id] = pb.Orders(checkpoints=orders, forget_before=before, confirm=ASKED)
        if (keeper := self.keepers.get(keeper_id)) is not None:
            keeper.outbox.put(pb.KeepResponse(orders=self.orders[keeper_id]))

    def url(self, keeper_id: str) -> str:
        """The URL that a keeper has told, on its newest stream or on one that has ended."""
        return self._urls[keeper_id]

    def source(self, keeper_id: str, *ranks: int) -> pb.Location:
        """A keeper as a source of parts."""
        return pb.Location(url=self.url(keeper_id), ranks=ranks)

    def connected(self, *keeper_ids: str) -> None:
        """Wait until these keepers have connected, and verified all that their orders name."""
        until(
            lambda: all(one in self.keepers and self.keepers[one].confirmed == ASKED for one in keeper_ids),
            "the keepers do not connect",
        )

    def gone(self, keeper_id: str) -> None:
        """Wait until the stream of a killed keeper has ended."""
        until(lambda: keeper_id not in self.keepers, "the keeper's stream does not end")

    def holds(self, keeper_id: str, made: MadeCheckpoint, ranks: Iterable[int]) -> None:
        """Wait until a keeper has reported exactly these parts."""
        until(
            lambda: self.held(keeper_id, made) == sorted(ranks),
            lambda: f"{keeper_id} holds {self.held(keeper_id, made)}",
        )

    def held(self, keeper_id: str, made: MadeCheckpoint) -> list[int] | None:
        """The ranks whose parts a keeper has reported last; None: it has not."""
        found = self.holding(keeper_id, made)
        return None if found is None else list(found.ranks)

    def holding(self, keeper_id: str, made: MadeCheckpoint) -> pb.Holding | None:
        """What a keeper has reported last of a checkpoint."""
        keeper = self.keepers.get(keeper_id)
        return None if keeper is None else keeper.holdings.get((made.attempt.generation, made.attempt.number))


def _key(attempt: pb.Attempt) -> tuple[int, int]:
    return attempt.generation, attempt.number
