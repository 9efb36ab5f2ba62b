"""The rendezvous handler without a coordinator: options, errors, and what workers inherit."""

import gc
import os
import socket
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from muster.client.errors import EnvironmentValueError
from muster.worker import rendezvous
from muster.worker.errors import ConnectError, MusterError, RefusedError, StoreTimeoutError
from muster.worker.node.membership import NodeConfig, NodeMembership, Place
from muster.worker.rendezvous import MusterRendezvousHandler, create_handler
from tests.unit.worker.fake_membership import FakeMembership, made, params, without_coordinator


@pytest.fixture(autouse=True)
def _no_coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from without_coordinator(monkeypatch)


# ---------------------------------------------------------------------- options


def test_torchs_registry_creates_the_handler():
    handler = get_rendezvous_handler(params())
    assert isinstance(handler, MusterRendezvousHandler)
    assert handler.get_backend() == "muster"
    assert handler.get_run_id() == "job"


def test_defaults_are_torchs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert made()[1].config == NodeConfig(
        endpoint="host:1",
        run_id="job",
        address="node-0",
        min_nodes=2,
        max_nodes=4,
        join_timeout=600,
        last_call_timeout=30,
        keep_alive_timeout=15,
        connect_timeout=60,
        call_timeout=5,
        name="n1",
    )


def test_settings_are_accepted_as_text():
    handler, membership = made(
        join_timeout="7",
        last_call_timeout="6",
        close_timeout="5",
        keep_alive_interval="4",
        keep_alive_max_attempt="3",
        heartbeat_timeout="2",
        read_timeout="1",
        timeout="900",
    )
    config = membership.config
    assert (config.join_timeout, config.last_call_timeout, config.keep_alive_timeout) == (7, 6, 12)
    assert (config.call_timeout, config.connect_timeout) == (2, 1)
    handler.set_closed()
    assert membership.done == ["close 5"]


SETTINGS = [
    "join_timeout",
    "last_call_timeout",
    "close_timeout",
    "heartbeat_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "read_timeout",
]


@pytest.mark.parametrize("value", ["x", "", "0", "-3", "1.5", "1e3", None, 0])
@pytest.mark.parametrize("key", SETTINGS)
def test_unusable_setting_is_named_with_an_example(key: str, value: Any):
    with pytest.raises(ValueError) as caught:
        made(**{key: value})
    assert str(caught.value).startswith(
        f"--rdzv-conf {key}={value}: it must be a whole number above 0, such as {key}="
    )


@pytest.mark.parametrize(
    ("given", "endpoint"),
    [
        ("host", "host:7550"),
        ("host:1", "host:1"),
        (" host:1 ", "host:1"),
        ("10.0.0.1", "10.0.0.1:7550"),
        ("[::1]:1", "[::1]:1"),
        ("[::1]", "[::1]:7550"),
        ("[fe80::1]:65535", "[fe80::1]:65535"),
        ("a:1,b:1", "a:1,b:1"),
        ("a, b:2 ,[::1],a", "a:7550,b:2,[::1]:7550"),
        ("unix:///run/relay.sock, a", "unix:///run/relay.sock,a:7550"),
    ],
)
def test_endpoint_gets_the_default_port_unless_it_names_one(given: str, endpoint: str):
    assert made(given)[1].config.endpoint == endpoint


@pytest.mark.parametrize(
    "given",
    [
        "a:1,",
        ",a:1",
        "a:1,,b:1",
        "a:1,b:x",
        "host:",
        "host:x",
        "host:0",
        "host:65536",
        "ho st:1",
        "http://host:1",
        "unix://relay.sock,a:1",
    ],
)
def test_unusable_endpoint_is_a_value_error(given: str):
    with pytest.raises(ValueError, match="endpoint"):
        made(given)


def test_endpoint_defaults_to_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_ENDPOINT", "there:2")
    assert made("")[1].config.endpoint == "there:2"
    monkeypatch.setenv("MUSTER_ENDPOINT", "")
    with pytest.raises(ValueError, match="no coordinator is named"):
        made("")


def test_address_defaults_to_the_machines_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "machine.example")
    handler = create_handler(RendezvousParameters("muster", "host:1", "job", 1, 1))
    assert handler._membership.config.address == "machine.example"


@pytest.mark.parametrize(("run_id", "why"), [("", "--rdzv-id is empty"), ("\udcff", "UTF-8")])
def test_unusable_run_id_is_a_value_error(run_id: str, why: str):
    with pytest.raises(ValueError, match=why):
        create_handler(params(run_id=run_id))


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("RUN_CLOSED", RendezvousClosedError),
        ("RUN_STOPPED", RendezvousGracefulExitError),
        ("NODE_NOT_NEEDED", RendezvousGracefulExitError),
        ("NODE_EVICTED", RendezvousGracefulExitError),
        ("RENDEZVOUS_TIMED_OUT", RendezvousTimeoutError),
        ("SETTINGS_DIFFER", RendezvousStateError),
        ("SUPERSEDED", RendezvousStateError),
        ("INVALID_ARGUMENT", RendezvousStateError),
        ("PROTOCOL_VERSION", RendezvousConnectionError),
        ("LIMIT_EXCEEDED", RendezvousConnectionError),
        ("UNIMPLEMENTED", RendezvousConnectionError),
        ("", RendezvousConnectionError),
    ],
)
def test_refusal_becomes_torchs_error_with_the_same_message(reason: str, kind: type[RendezvousError]):
    handler, membership = made()
    membership.answer = RefusedError("what, why, and what to do", reason)
    for action in (handler.next_rendezvous, handler.is_closed, handler.set_closed):
        with pytest.raises(RendezvousError) as caught:
            action()
        assert type(caught.value) is kind
        assert str(caught.value) == "what, why, and what to do"
        assert caught.value.__cause__ is membership.answer


def test_lost_coordinator_is_a_connection_error():
    handler, membership = made()
    membership.answer = ConnectError("where and why")
    with pytest.raises(RendezvousConnectionError, match="where and why"):
        handler.next_rendezvous()


def test_shutdown_closes_leaves_and_returns_whether_the_run_is_closed():
    handler, membership = made()
    assert handler.shutdown()
    assert membership.done == ["close 30", "leave"]
    membership.answer = MusterError("not there")
    assert not handler.shutdown()
    assert membership.done[2:] == ["close 30", "leave"], "it leaves in any case"
    assert handler._store._line is None


class FakeStore:
    """An agents' store: which keys it has, and the errors of looks."""

    def __init__(self, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.looks: list[str] = []

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self.looks += keys
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer


def lossy(*answers: Exception | None) -> tuple[MusterRendezvousHandler, FakeMembership, FakeStore]:
    """A handler in a round that has lost two nodes, and a store with these answers."""
    handler, membership = made()
    handler._place, membership.nodes_lost = Place(3, 0, 4), 2
    store = FakeStore(*answers)
    handler._store = store  # type: ignore[assignment]
    return handler, membership, store


def test_lost_nodes_count_as_waiting():
    handler, _, store = lossy(StoreTimeoutError("not there", keys=()))
    assert handler.num_nodes_waiting() == 2
    assert store.looks == ["torch.rendezvous.job.3/torchelastic/agent/terminal_state/num_members"]


def test_nodes_that_wait_count_without_a_look_at_the_store():
    handler, membership, store = lossy()
    membership.nodes_waiting = 1
    assert handler.num_nodes_waiting() == 1
    assert store.looks == []


def test_agent_does_not_wait_for_the_address_of_rank_0_after_its_round_lost_a_node():
    handler, _, _ = lossy(StoreTimeoutError("not there", keys=()))
    assert not handler._await_rank_0(Place(3, 1, 4))


def test_lost_nodes_do_not_count_once_an_agent_waits_at_the_exit():
    handler, _, store = lossy(None)
    assert [handler.num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
    assert len(store.looks) == 1


def test_lost_nodes_count_once_the_coordinator_says_whether_the_round_ends():
    handler, _, _ = lossy(ConnectError("away"), StoreTimeoutError("not there", keys=()))
    assert [handler.num_nodes_waiting() for _ in range(2)] == [0, 2]


def test_collected_handler_gives_up_its_place_and_connection():
    handler, membership = made()
    store = handler._store
    del handler
    gc.collect()
    assert membership.done == ["abandon"]
    assert store._line is None


def test_fork_drops_handler_that_only_a_cycle_keeps():
    handler, membership = made()
    handler.itself = handler  # type: ignore[attr-defined]
    gc.disable()
    try:
        del handler
        assert membership.done == []
        rendezvous._drop_unreachable()
        assert membership.done == ["abandon"]
    finally:
        gc.enable()


def test_fork_collects_nothing_where_no_handler_is_left(monkeypatch: pytest.MonkeyPatch):
    collected: list[bool] = []
    monkeypatch.setattr(rendezvous, "_handlers", weakref.WeakSet())
    handler, _ = made()
    monkeypatch.setattr(gc, "collect", lambda: collected.append(True))
    rendezvous._drop_unreachable()
    assert collected == [True]
    handler.shutdown()
    rendezvous._drop_unreachable()
    assert collected == [True]


@pytest.mark.parametrize("closed", [True, False])
def test_handler_asks_whether_the_run_is_closed_only_if_unknown(closed: bool):
    handler, membership = made()
    membership.closed = closed
    assert handler.is_closed() is closed
    assert membership.done == []
    membership.closed = None
    assert handler.is_closed() is False
    assert membership.done == ["asked"]


# ---------------------------------------------------------------------- what workers inherit


def test_workers_inherit_the_round_and_the_endpoint():
    handler, _ = made("there:5", relay="false")
    handler._export(Place(7, 0, 1))
    assert (os.environ["MUSTER_ROUND"], os.environ["MUSTER_ENDPOINT"]) == ("7", "there:5")
    handler._export(Place(8, 0, 1))
    assert os.environ["MUSTER_ROUND"] == "8"


def test_workers_inherit_the_agents_coordinator_and_run(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_ENDPOINT", "theirs:1")
    monkeypatch.setenv("MUSTER_RUN_ID", "theirs")
    handler, _ = made("ours:1", relay="false")
    handler._export(Place(0, 0, 1))
    assert os.environ["MUSTER_ENDPOINT"] == "ours:1"
    assert os.environ["MUSTER_RUN_ID"] == handler.get_run_id()


class FakeRelay:
    """What the handler does with its node's relay."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = f"unix:///run/relay.sock,{endpoint}"
        self.done: list[float] = []

    def stop(self, timeout: float = 5.0) -> None:
        self.done.append(timeout)


@pytest.fixture
def relays(monkeypatch: pytest.MonkeyPatch) -> list[FakeRelay]:
    """Those that were begun."""
    begun: list[FakeRelay] = []

    def begin(endpoint: str) -> FakeRelay:
        begun.append(FakeRelay(endpoint))
        return begun[-1]

    monkeypatch.setattr(rendezvous, "start", begin)
    return begun


@pytest.mark.parametrize("conf", [{}, {"relay": "true"}, {"relay": "True"}, {"relay": True}, {"relay": "1"}])
def test_agent_and_workers_use_one_relay_in_all_rounds(relays: list[FakeRelay], conf: dict[str, Any]):
    handler, membership = made("there:5", **conf)
    (relay,) = relays
    assert relay.endpoint == membership.config.endpoint == handler._store.endpoint
    for round in (0, 1):
        handler._export(Place(round, 0, 1))
        assert os.environ["MUSTER_ENDPOINT"] == relay.endpoint
    assert relay.done == []
    handler.shutdown()
    assert relay.done == [5.0]


@pytest.mark.parametrize("value", ["false", "False", "0", False, 0])
def test_workers_connect_directly_without_a_relay(relays: list[FakeRelay], value: Any):
    handler, _ = made("there:5", relay=value)
    handler._export(Place(0, 0, 1))
    assert (relays, os.environ["MUSTER_ENDPOINT"]) == ([], "there:5")


def test_node_goes_without_a_relay_that_cannot_start():
    handler, membership = made("there:5")
    handler._export(Place(0, 0, 1))
    assert membership.config.endpoint == os.environ["MUSTER_ENDPOINT"] == "there:5"
    handler.shutdown()


def test_node_that_cannot_connect_leaves_no_relay(relays: list[FakeRelay], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_TOKEN", "two words")
    monkeypatch.setattr(rendezvous, "NodeMembership", NodeMembership)
    with pytest.raises(EnvironmentValueError, match="MUSTER_TOKEN"):
        create_handler(params("there:5"))
    assert relays[0].done == [5.0]


def test_collected_handler_stops_its_relay_without_waiting(relays: list[FakeRelay]):
    made("there:5")
    gc.collect()
    assert relays[0].done == [0.0]


@pytest.mark.parametrize("value", ["", "yes", "2", "on", None])
def test_relay_setting_is_true_or_false(value: Any):
    with pytest.raises(ValueError, match=r"--rdzv-conf relay=.*: it must be true or false, such as relay="):
        made(relay=value)


@pytest.mark.parametrize(("value", "shared"), [(None, True), ("0", True), ("1", False)])
def test_agents_store_is_shared_unless_torchs_variable_forbids_it(
    monkeypatch: pytest.MonkeyPatch, value: str | None, shared: bool
):
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", value)
    assert made()[0].use_agent_store is shared


def test_fake_membership_has_the_real_ones_attributes():
    named = {name for name in vars(FakeMembership) if not name.startswith("_")}
    assert named <= set(vars(NodeMembership))
