"""Nodes that come together, on torch's ``c10d`` backend and on ours: threads of the test process.

The handlers are those of torch's own registry. Every node speaks through a proxy of its own where a test
takes its network away, which is how a machine dies for all others.
"""

import base64
import contextlib
import itertools
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import grpc
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator, free_port
from lab.processes.proxy import Proxy
from muster.v1 import rendezvous_pb2 as pb
from muster.v1 import rendezvous_pb2_grpc

T = TypeVar("T")
M = TypeVar("M", bound="RendezvousRun")

CONF = {
    "join_timeout": 25,
    "last_call_timeout": 1,
    "close_timeout": 5,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 60,
    "read_timeout": 20,
}
"""torch's settings, shortened. No node is removed because the machine was busy for some seconds."""
REMOVED_SOON: dict[str, Any] = {"keep_alive_max_attempt": 4}
"""What differs where a node must be removed. With fewer attempts, ``c10d`` removes living nodes as well."""

_numbers = itertools.count()


def in_thread(function: Callable[[], T]) -> "Future[T]":
    """Call a function in a thread that does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Joining:
    """A node that waits for its round."""

    def __init__(self, handler: RendezvousHandler) -> None:
        self._future = in_thread(handler.next_rendezvous)

    @property
    def done(self) -> bool:
        """Whether its wait is over."""
        return self._future.done()

    def info(self) -> RendezvousInfo:
        """What it was given."""
        info = self._future.result(PATIENCE)
        assert isinstance(info, RendezvousInfo)
        return info

    def error(self) -> BaseException:
        """Why it was given nothing."""
        error = self._future.exception(PATIENCE)
        assert error is not None, "it was let in"
        return error


@dataclass(frozen=True, slots=True)
class Seen:
    """A rendezvous as an onlooker sees it."""

    complete: bool = False
    participants: int = 0
    waiting: int = 0
    redundant: int = 0


class RendezvousRun:
    """One run on one backend.

    Args:
        run_id: the run.
    """

    backend: str
    port: int

    def __init__(self, run_id: str = "") -> None:
        self.run_id = run_id or f"meeting-{next(_numbers)}"
        self.nodes: list[RendezvousHandler] = []
        self._proxies: dict[RendezvousHandler, Proxy] = {}

    def seen(self) -> Seen:
        """How it stands."""
        raise NotImplementedError

    def node(
        self, nnodes: str, address: str = "127.0.0.1", *, mortal: bool = False, **conf: int
    ) -> RendezvousHandler:
        """One more node.

        Args:
            nnodes: MIN:MAX.
            address: of the node; every one that begins with 127 is this machine.
            mortal: whether its network may be taken away.
            conf: what differs from ``CONF``.
        """
        least, _, most = nnodes.partition(":")
        port = self.port
        proxy = Proxy(port).__enter__() if mortal else None
        if proxy is not None:
            port = int(proxy.endpoint.rpartition(":")[2])
        params = RendezvousParameters(
            self.backend,
            f"127.0.0.1:{port}",
            self.run_id,
            int(least),
            int(most or least),
            address,
            **self._conf(conf),
        )
        handler = get_rendezvous_handler(params)
        self.nodes.append(handler)
        if proxy is not None:
            self._proxies[handler] = proxy
        return handler

    def _conf(self, conf: dict[str, int]) -> dict[str, object]:
        return {**CONF, **conf}

    def part(self, handler: RendezvousHandler) -> None:
        """Take a mortal node's network away: nobody hears of it any more."""
        self._proxies[handler].cut(refuse=True)

    def heal(self, handler: RendezvousHandler) -> None:
        """Give it back."""
        self._proxies[handler].heal()

    def end(self) -> None:
        """End all nodes."""
        for handler in self.nodes:
            handler.shutdown()
        for proxy in self._proxies.values():
            proxy.__exit__(None, None, None)


class TorchRendezvous(RendezvousRun):
    """A run on torch's backend; its store is hosted here, so that any node may die."""

    backend = "c10d"

    def __init__(self, run_id: str = "") -> None:
        super().__init__(run_id)
        self.port = free_port()
        self._server = dist.TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)

    def _conf(self, conf: dict[str, int]) -> dict[str, object]:
        return {**CONF, "is_host": False, **conf}

    def seen(self) -> Seen:
        key = f"torch.rendezvous.{self.run_id}"
        if not self._server.check([key]):
            return Seen()
        with contextlib.suppress(EOFError, pickle.PickleError):  # the sentinel: nobody has come yet
            state = pickle.loads(base64.b64decode(self._server.get(key)))
            return Seen(
                state.complete, len(state.participants), len(state.wait_list), len(state.redundancy_list)
            )
        return Seen()


class MusterRendezvous(RendezvousRun):
    """A run on a coordinator."""

    backend = "muster"

    def __init__(self, coordinator: Coordinator, run_id: str = "") -> None:
        super().__init__(run_id)
        self.port = coordinator.port
        self._endpoint = coordinator.endpoint

    def show(self) -> pb.Rendezvous:
        """The rendezvous, as people see it."""
        with grpc.insecure_channel(
            self._endpoint, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            stub = rendezvous_pb2_grpc.RendezvousServiceStub(channel)
            request = pb.RendezvousServiceGetRequest(run_id=self.run_id)
            return stub.Get(request, timeout=PATIENCE, wait_for_ready=True).rendezvous

    def seen(self) -> Seen:
        try:
            shown = self.show()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return Seen()
        standings = [node.standing for node in shown.nodes]
        return Seen(
            shown.complete,
            standings.count(pb.NODE_STANDING_PARTICIPANT),
            standings.count(pb.NODE_STANDING_WAITING),
            standings.count(pb.NODE_STANDING_REDUNDANT),
        )


@contextlib.contextmanager
def meeting(made: M) -> Iterator[M]:
    """A meeting whose nodes are ended afterwards."""
    try:
        yield made
    finally:
        made.end()


@contextlib.contextmanager
def kept_environment() -> Iterator[None]:
    """Take back what our handler exports to the workers."""
    before = {name: os.environ.get(name) for name in ("MUSTER_ROUND", "MUSTER_ENDPOINT", "MUSTER_RUN_ID")}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


Scenario = Callable[[RendezvousRun], T]


class Each(Protocol):
    """Runs a scenario on both; returns what came of it in theirs and in ours."""

    def __call__(self, scenario: Scenario[T]) -> tuple[T, T]: ...


class Both(Protocol):
    """Runs a scenario on both, which must do the same; returns it."""

    def __call__(self, scenario: Scenario[T]) -> T: ...


UNHURRIED = 5
"""Seconds of a last call in which more nodes than the fewest come. Nodes of ``c10d`` look once
a second, and no node waits for a later one."""


def together(*handlers: RendezvousHandler) -> list[RendezvousInfo]:
    """All join, one after the other, and all are let in."""
    return [joining.info() for joining in [Joining(handler) for handler in handlers]]


def worlds(infos: list[RendezvousInfo]) -> list[tuple[int, int]]:
    return [(info.rank, info.world_size) for info in infos]


def shape(infos: list[RendezvousInfo]) -> tuple[list[int], set[int]]:
    """Return the ranks in order, and the world sizes."""
    return sorted(info.rank for info in infos), {info.world_size for info in infos}


def connected(info: RendezvousInfo, key: str) -> bytes:
    """What a worker does: a TCPStore client of the agents' store. Returns what it reads back."""
    where = info.bootstrap_store_info
    assert where is not None
    timeout = timedelta(seconds=PATIENCE)
    store = dist.TCPStore(where.master_addr, where.master_port, is_master=False, timeout=timeout)
    store.set(key, "here")
    return store.get(key)


def places(infos: list[RendezvousInfo]) -> list[tuple[str, int]]:
    found = [info.bootstrap_store_info for info in infos]
    return [(where.master_addr, where.master_port) for where in found if where is not None]
