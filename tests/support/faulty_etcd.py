"""A client of etcd that loses answers or crashes at a transaction of the test's choice."""

import grpc
from google.protobuf.message import Message

from lab.leaders import client, take_the_lead
from lab.patience import PATIENCE
from muster.service.etcd import client as etcd_client
from muster.service.etcd.client import TXN, Connection, Etcd, Method
from muster.service.etcd.location import Access, Location
from muster.service.storage.etcd import EtcdEngine


class Crash(Exception):
    """The writing process crashes."""


class LostError(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the answer got lost"


class FaultyEtcd(Etcd):
    """A client that crashes or loses answers.

    Args:
        location: the state.
        falls_after: the process crashes after the transaction of this number is carried out.
        loses: the answers to the transactions of these numbers get lost.
    """

    def __init__(
        self, location: Location, *, falls_after: int | None = None, loses: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(location.endpoints, Access(), attempt_timeout=PATIENCE / 10)
        self.transactions = 0
        self._falls_after = falls_after
        self._loses = loses

    def _called(
        self,
        connection: Connection,
        method: Method,
        request: Message,
        metadata: etcd_client.Metadata,
        timeout: float,
    ) -> Message:
        answer = super()._called(connection, method, request, metadata, timeout)
        if method is TXN:
            self.transactions += 1
            if self.transactions == self._falls_after:
                raise Crash
            if self.transactions in self._loses:
                raise LostError
        return answer


def engine_of(etcd: Etcd, location: Location) -> EtcdEngine:
    """Return an engine that leads over a client, which may be faulty from now on."""
    with_luck = client(location)
    engine = EtcdEngine(etcd, location, take_the_lead(with_luck, location))
    with_luck.close()
    return engine


def rows(engine: EtcdEngine) -> dict[bytes, bytes]:
    return dict(engine.scan())
