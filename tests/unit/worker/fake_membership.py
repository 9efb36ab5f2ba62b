"""A rendezvous handler whose membership answers what the test sets."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from muster.worker import rendezvous
from muster.worker.node.membership import NodeConfig, Place
from muster.worker.rendezvous import MusterRendezvousHandler, create_handler


class FakeMembership:
    """What the handler asks; it answers what the test sets."""

    def __init__(self, config: NodeConfig, on_departure: Callable[[Place, int], None]) -> None:
        self.config = config
        self.on_departure = on_departure
        self.stopped = self.evicted = False
        self.answer: Place | Exception = Place(0, 0, 1)
        self.closed: bool | None = None
        self.nodes_waiting = self.nodes_lost = 0
        self.done: list[str] = []

    def join(self) -> Place:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def ask_closed(self) -> bool:
        self.done.append("asked")
        return bool(self.join().round)

    def ask_stopped(self, timeout: float) -> bool:
        return self.stopped

    def close(self, reason: str, timeout: float) -> None:
        self.done.append(f"close {timeout:g}")
        self.join()

    def leave(self, reason: str) -> None:
        self.done.append("leave")

    def abandon(self) -> None:
        self.done.append("abandon")


def without_coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let handlers have a fake membership, and undo what their hook changes. For a fixture."""
    monkeypatch.setattr(rendezvous, "NodeMembership", FakeMembership)
    monkeypatch.setattr(rendezvous, "start", lambda endpoint: None)
    monkeypatch.setenv("MUSTER_ROUND", "0")
    monkeypatch.setenv("MUSTER_ENDPOINT", "")
    monkeypatch.setenv("MUSTER_RUN_ID", "")
    before = signal.getsignal(signal.SIGTERM)
    yield
    # The hook ignores the signal, since its process ends; and it looks at all handlers.
    signal.signal(signal.SIGTERM, before)
    rendezvous._handlers.clear()


def params(endpoint: str = "host:1", run_id: str = "job", **conf: Any) -> RendezvousParameters:
    return RendezvousParameters("muster", endpoint, run_id, 2, 4, "node-0", **conf)


def made(endpoint: str = "host:1", **conf: Any) -> tuple[MusterRendezvousHandler, FakeMembership]:
    handler = create_handler(params(endpoint, **conf))
    membership: object = handler._membership
    assert isinstance(membership, FakeMembership)
    return handler, membership
