"""The rendezvous handler without a coordinator: options, errors, and what workers inherit."""

import gc
import os
import socket
import weakref
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
from muster.worker.errors import ConnectError, MusterError, RefusedError
from muster.worker.node.attendance import Attendance, NodeConfig, Place
from muster.worker.rendezvous import MusterRendezvousHandler, create_handler


class FakeAttendance:
    """What the handler asks; it answers what the test sets."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.answer: Place | Exception = Place(0, 0, 1)
        self.closed: bool | None = None
        self.nodes_waiting = 0
        self.done: list[str] = []

    def join(self) -> Place:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def ask_closed(self) -> bool:
        self.done.append("asked")
        return bool(self.join().round)

    def close(self, reason: str, timeout: float) -> None:
        self.done.append(f"close {timeout:g}")
        self.join()

    def leave(self, reason: str) -> None:
        self.done.append("leave")

    def abandon(self) -> None:
        self.done.append("abandon")


@pytest.fixture(autouse=True)
def _no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "Attendance", FakeAttendance)
    monkeypatch.setattr(rendezvous, "begin", lambda endpoint: None)
    monkeypatch.setenv("MUSTER_ROUND", "0")
    monkeypatch.setenv("MUSTER_ENDPOINT", "")
    monkeypatch.setenv("MUSTER_RUN_ID", "")


def params(endpoint: str = "host:1", run_id: str = "job", **conf: Any) -> RendezvousParameters:
    return RendezvousParameters("muster", endpoint, run_id, 2, 4, "node-0", **conf)


def made(endpoint: str = "host:1", **conf: Any) -> tuple[MusterRendezvousHandler, FakeAttendance]:
    handler = create_handler(params(endpoint, **conf))
    attendance: object = handler._attendance
    assert isinstance(attendance, FakeAttendance)
    return handler, attendance


# ---------------------------------------------------------------------- options


def test_torchs_registry_makes_ours():
    handler = get_rendezvous_handler(params())
    assert isinstance(handler, MusterRendezvousHandler)
    assert handler.get_backend() == "muster"
    assert handler.get_run_id() == "job"


def test_the_defaults_are_torchs():
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
    )


def test_torchrun_hands_settings_over_as_text():
    handler, attendance = made(
        join_timeout="7",
        last_call_timeout="6",
        close_timeout="5",
        keep_alive_interval="4",
        keep_alive_max_attempt="3",
        heartbeat_timeout="2",
        read_timeout="1",
        timeout="900",
    )
    config = attendance.config
    assert (config.join_timeout, config.last_call_timeout, config.keep_alive_timeout) == (7, 6, 12)
    assert (config.call_timeout, config.connect_timeout) == (2, 1)
    handler.set_closed()
    assert attendance.done == ["close 5"]


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
def test_a_setting_that_is_not_usable_is_named_with_an_example(key: str, value: Any):
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
def test_an_endpoint_has_our_port_unless_it_names_one(given: str, endpoint: str):
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
def test_an_endpoint_that_is_none_is_a_value_error(given: str):
    with pytest.raises(ValueError, match="endpoint"):
        made(given)


def test_without_an_endpoint_it_is_the_environments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_ENDPOINT", "there:2")
    assert made("")[1].config.endpoint == "there:2"
    monkeypatch.setenv("MUSTER_ENDPOINT", "")
    with pytest.raises(ValueError, match="no coordinator is named"):
        made("")


def test_without_an_address_a_node_goes_by_its_machines_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "getfqdn", lambda: "machine.example")
    handler = create_handler(RendezvousParameters("muster", "host:1", "job", 1, 1))
    assert handler._attendance.config.address == "machine.example"


@pytest.mark.parametrize(("run_id", "why"), [("", "--rdzv-id is empty"), ("\udcff", "UTF-8")])
def test_a_run_id_that_is_none_is_a_value_error(run_id: str, why: str):
    with pytest.raises(ValueError, match=why):
        create_handler(params(run_id=run_id))


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("RUN_CLOSED", RendezvousClosedError),
        ("NODE_NOT_NEEDED", RendezvousGracefulExitError),
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
def test_a_refusal_becomes_torchs_error_with_the_sentence(reason: str, kind: type[RendezvousError]):
    handler, attendance = made()
    attendance.answer = RefusedError("what, why, and what to do", reason)
    for action in (handler.next_rendezvous, handler.is_closed, handler.set_closed):
        with pytest.raises(RendezvousError) as caught:
            action()
        assert type(caught.value) is kind
        assert str(caught.value) == "what, why, and what to do"
        assert caught.value.__cause__ is attendance.answer


def test_a_lost_coordinator_is_an_error_of_the_connection():
    handler, attendance = made()
    attendance.answer = ConnectError("where and why")
    with pytest.raises(RendezvousConnectionError, match="where and why"):
        handler.next_rendezvous()


def test_shutting_down_closes_and_leaves_and_says_whether_it_was_heard():
    handler, attendance = made()
    assert handler.shutdown()
    assert attendance.done == ["close 30", "leave"]
    attendance.answer = MusterError("not there")
    assert not handler.shutdown()
    assert attendance.done[2:] == ["close 30", "leave"], "it leaves in any case"
    assert handler._store._line is None


def test_a_handler_that_is_dropped_lets_go_of_its_place_and_connection():
    handler, attendance = made()
    store = handler._store
    del handler
    gc.collect()
    assert attendance.done == ["abandon"]
    assert store._line is None


def test_fork_drops_handler_that_only_a_cycle_keeps():
    handler, attendance = made()
    handler.itself = handler  # type: ignore[attr-defined]
    gc.disable()
    try:
        del handler
        assert attendance.done == []
        rendezvous._drop_unreachable()
        assert attendance.done == ["abandon"]
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
def test_whether_it_is_closed_is_asked_only_when_it_was_not_told(closed: bool):
    handler, attendance = made()
    attendance.closed = closed
    assert handler.is_closed() is closed
    assert attendance.done == []
    attendance.closed = None
    assert handler.is_closed() is False
    assert attendance.done == ["asked"]


# ---------------------------------------------------------------------- what workers inherit


def test_workers_inherit_the_round_and_the_endpoint():
    handler, _ = made("there:5", relay="false")
    handler._export(Place(7, 0, 1))
    assert (os.environ["MUSTER_ROUND"], os.environ["MUSTER_ENDPOINT"]) == ("7", "there:5")
    handler._export(Place(8, 0, 1))
    assert os.environ["MUSTER_ROUND"] == "8"


def test_the_workers_are_sent_to_the_coordinator_and_run_of_the_agents(monkeypatch: pytest.MonkeyPatch):
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

    monkeypatch.setattr(rendezvous, "begin", begin)
    return begun


@pytest.mark.parametrize("conf", [{}, {"relay": "true"}, {"relay": "True"}, {"relay": True}, {"relay": "1"}])
def test_an_agent_and_its_workers_speak_through_one_relay_in_all_rounds(
    relays: list[FakeRelay], conf: dict[str, Any]
):
    handler, attendance = made("there:5", **conf)
    (relay,) = relays
    assert relay.endpoint == attendance.config.endpoint == handler._store.endpoint
    for round in (0, 1):
        handler._export(Place(round, 0, 1))
        assert os.environ["MUSTER_ENDPOINT"] == relay.endpoint
    assert relay.done == []
    handler.shutdown()
    assert relay.done == [5.0]


@pytest.mark.parametrize("value", ["false", "False", "0", False, 0])
def test_without_a_relay_the_workers_speak_for_themselves(relays: list[FakeRelay], value: Any):
    handler, _ = made("there:5", relay=value)
    handler._export(Place(0, 0, 1))
    assert (relays, os.environ["MUSTER_ENDPOINT"]) == ([], "there:5")


def test_a_node_whose_relay_cannot_begin_goes_without():
    handler, attendance = made("there:5")
    handler._export(Place(0, 0, 1))
    assert attendance.config.endpoint == os.environ["MUSTER_ENDPOINT"] == "there:5"
    handler.shutdown()


def test_a_node_that_cannot_connect_leaves_no_relay(relays: list[FakeRelay], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_TOKEN", "two words")
    monkeypatch.setattr(rendezvous, "Attendance", Attendance)
    with pytest.raises(EnvironmentValueError, match="MUSTER_TOKEN"):
        create_handler(params("there:5"))
    assert relays[0].done == [5.0]


def test_a_handler_that_is_dropped_ends_its_relay_and_waits_for_nothing(relays: list[FakeRelay]):
    made("there:5")
    gc.collect()
    assert relays[0].done == [0.0]


@pytest.mark.parametrize("value", ["", "yes", "2", "on", None])
def test_a_relay_is_wanted_or_not(value: Any):
    with pytest.raises(ValueError, match=r"--rdzv-conf relay=.*: it must be true or false, such as relay="):
        made(relay=value)


@pytest.mark.parametrize(("value", "shared"), [(None, True), ("0", True), ("1", False)])
def test_the_agents_store_is_shared_unless_torchs_variable_says_no(
    monkeypatch: pytest.MonkeyPatch, value: str | None, shared: bool
):
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", value)
    assert made()[0].use_agent_store is shared


def test_the_stand_in_has_what_the_real_one_has():
    named = {name for name in vars(FakeAttendance) if not name.startswith("_")}
    assert named <= set(vars(Attendance))
