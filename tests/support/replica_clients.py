"""A coordinator that another one follows, and every kind of client, for tests of several replicas."""

from datetime import timedelta
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator
from muster.service.cli.failure import Exit
from muster.service.cli.main import app
from muster.worker import CoordinatorStore, GrpcBarrier
from muster.worker.node.membership import NodeConfig, NodeMembership, Place
from tests.support.standby import Address, Standby

LONG = timedelta(seconds=PATIENCE)


class Succession:
    """A coordinator that may be followed by another one, on the same state and elsewhere.

    Args:
        folder: of the state and the logs.
    """

    def __init__(self, folder: Path) -> None:
        for name in "ab":
            (folder / name).mkdir()
        state = f"sqlite:///{folder / 'muster.db'}"
        # Only the one that a test is about may give anyone up.
        self.first, self.second = (
            Coordinator(folder / name, state=state, session_ttl=PATIENCE) for name in "ab"
        )
        self._reserved = Address()
        self.second.port, self.second.endpoint = self._reserved.port, self._reserved.endpoint
        self.second.listens = self.second.endpoint
        self.first.start()
        self.standby = Standby(self.first.endpoint)
        self.endpoint = ",".join(one.endpoint for one in (self.standby, self.first, self.second))

    def happens(self) -> None:
        """The leader dies, nobody leads for a while, and then the other one does."""
        self.first.kill()
        self.standby.follow("")
        self.standby.holds()
        self._reserved.give_up()
        self.second.start()
        self.standby.follow(self.second.endpoint)

    def end(self) -> None:
        """Stop them all."""
        self.standby.stop()
        self._reserved.give_up()
        self.first.kill()
        self.second.kill()


def node(endpoint: str, address: str = "node-0", **more: Any) -> NodeMembership:
    terms: dict[str, Any] = {
        "run_id": "run",
        "address": address,
        "min_nodes": 1,
        "max_nodes": 1,
        "join_timeout": PATIENCE,
        "last_call_timeout": 1,
        "keep_alive_timeout": PATIENCE,
        "connect_timeout": PATIENCE,
        "call_timeout": PATIENCE,
    }
    return NodeMembership(NodeConfig(endpoint=endpoint, **terms | more))


def a_barrier(endpoint: str) -> None:
    GrpcBarrier(0, 1, "p", endpoint, PATIENCE, PATIENCE, run_id="run", generation=0).execute_barrier()


def a_store(endpoint: str) -> None:
    store = CoordinatorStore(endpoint, "run", LONG)
    store.set("k", "v")
    assert store.get("k") == b"v"


def a_round(endpoint: str) -> None:
    one = node(endpoint)
    try:
        assert one.join() == Place(0, 0, 1)
        assert one.ask_closed() is False
    finally:
        one.close("over", PATIENCE)
        one.leave("over")


def a_command(endpoint: str) -> None:
    answer = CliRunner().invoke(app, ["get", "runs", "--endpoint", endpoint, "--timeout", str(PATIENCE)])
    assert answer.exit_code == Exit.DONE, answer.output


CLIENTS = [a_barrier, a_store, a_round, a_command]


def barrier_within(endpoint: str, seconds: float) -> None:
    GrpcBarrier(0, 1, "p", endpoint, seconds, seconds, run_id="run", generation=0)


def store_within(endpoint: str, seconds: float) -> None:
    CoordinatorStore(endpoint, "run", timedelta(seconds=seconds)).set("k", "v")


def round_within(endpoint: str, seconds: float) -> None:
    one = node(endpoint, connect_timeout=seconds)
    try:
        one.join()
    finally:
        one.leave("over")


def asking_within(endpoint: str, seconds: float) -> None:
    node(endpoint, connect_timeout=seconds).ask_closed()


WITHIN = [barrier_within, store_within, round_within, asking_within]
