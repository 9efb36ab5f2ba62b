"""What a process learns of an endpoint, and how names are resolved."""

import os
import socket
from collections.abc import Callable

import pytest

from muster.client import replicas as module
from muster.client.replicas import resolve
from tests.support.expect import raising
from tests.unit.client.search_world import LIST, World


@pytest.fixture
def world() -> World:
    return World()


# ---------------------------------------------------------------------- what is learned


def test_replicas_of_a_standby_are_called_in_the_same_turn():
    caller = World("a:1").search()
    assert caller.stands_by(replicas=["b:1", "c:1"]) == ("b:1", False)
    assert caller.failed() == ("c:1", False)
    assert caller.failed() == ("a:1", True), "the only one that answers"


def test_endpoint_is_called_when_no_learned_replica_answers():
    world = World("service:1")
    world.replicas.learn(["x:1", "y:1"])
    caller = world.search()
    assert [caller.calls, caller.failed(), caller.failed(), caller.failed()] == [
        "x:1",
        ("y:1", False),
        ("service:1", False),
        ("x:1", True),
    ]


def test_newest_list_of_replicas_counts_unless_it_is_empty(world: World):
    world.replicas.learn(["x:1"])
    world.replicas.learn(["y:1"])
    world.replicas.learn([])
    world.replicas.learn(["", "nonsense"])
    assert world.replicas.known() == ["y:1", "a:1", "b:1", "c:1"]


def test_number_of_learned_replicas_is_limited(world: World):
    world.replicas.learn(f"x:{port}" for port in range(1, 5_000))
    assert len(world.replicas.known()) == module.MAX_REPLICAS + 3


def test_timeouts_are_short_among_several():
    world = World("a:1")
    caller = world.search()
    assert (caller.search.target.connect_timeout_ms, caller.search.target.keepalive_ms) == (5_000, 3_333)
    world.replicas.learn(["a:1", "b:1"])
    assert (caller.search.target.connect_timeout_ms, caller.search.target.keepalive_ms) == (2_000, 1_667)


@pytest.mark.parametrize(
    ("endpoint", "asked_for", "used"), [("a:1", 900, 900), (LIST, 900, 900), (LIST, 9_000, 3_333)]
)
def test_keepalive_is_the_coordinators(endpoint: str, asked_for: int, used: int):
    world = World(endpoint)
    world.replicas.learn([], asked_for)
    world.replicas.learn([], 0)
    assert world.search().search.target.keepalive_ms == used


# ---------------------------------------------------------------------- names


def test_addresses_of_a_name_are_called_after_the_name_failed():
    world = World("name:1", name=["10.0.0.1:1", "10.0.0.2:1"])
    caller = world.search()
    assert (caller.calls, world.looked_up) == ("name:1", [])
    assert caller.failed() == ("10.0.0.1:1", False)
    assert caller.failed() == ("10.0.0.2:1", False)
    assert caller.failed() == ("10.0.0.1:1", True)


def test_certificate_of_learned_address_must_name_the_configured_endpoint():
    world = World("name:1,other:1", name=["10.0.0.1:1", "10.0.0.2:1"])
    caller = world.search()
    assert caller.search.target.tls_name == ""
    caller.failed()
    caller.failed()
    assert (caller.calls, caller.search.target.tls_name) == ("10.0.0.1:1", "name")
    caller.stands_by("told:1")
    assert (caller.calls, caller.search.target.tls_name) == ("told:1", "name")
    world.replicas.learn(["other:1", "10.9.9.9:1"])
    assert [world.replicas.target(one).tls_name for one in ("other:1", "10.9.9.9:1")] == ["", "name"]


def test_certificate_of_address_learned_through_a_socket_names_its_host():
    world = World("unix:///run/muster/relay.sock")
    world.replicas.learn(["told:1"])
    assert world.replicas.target("told:1").tls_name == ""


def test_name_with_one_address_is_called_by_its_name():
    world = World("name:1", name=["10.0.0.1:1"])
    caller = world.search()
    assert caller.failed() == ("name:1", True)
    assert caller.search.target == module.Target("name:1")


def test_name_is_resolved_in_each_turn():
    world = World("name:1", name=["10.0.0.1:1", "10.0.0.2:1"])
    caller = world.search()
    for _ in range(3):
        caller.failed()
    world.names["name:1"] = ["10.0.0.3:1", "10.0.0.4:1"]
    turn = [caller.failed()[0] for _ in range(3)]
    assert turn == ["10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1"]


def found(*addresses: tuple[socket.AddressFamily, str]) -> Callable[..., object]:
    return lambda *_, **__: [(family, 1, 6, "", (address, 1)) for family, address in addresses]


def test_names_are_resolved_by_the_system(monkeypatch: pytest.MonkeyPatch):
    addresses = ["10.0.0.1", "10.0.0.2", "10.0.0.1"]
    monkeypatch.setattr(socket, "getaddrinfo", found(*((socket.AF_INET, one) for one in addresses)))
    assert resolve("name:7550") == ["10.0.0.1:7550", "10.0.0.2:7550"]
    monkeypatch.setattr(
        socket, "getaddrinfo", found((socket.AF_INET6, "fd00::1"), (socket.AF_INET6, "fd00::2"))
    )
    assert resolve("name:7550") == ["[fd00::1]:7550", "[fd00::2]:7550"]


def test_addresses_of_both_families_are_one_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "getaddrinfo", found((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")))
    assert resolve("localhost:7550") == ["[::1]:7550"]


@pytest.mark.parametrize("address", ["10.0.0.1:1", "[::1]:1"])
def test_ip_address_is_not_resolved(monkeypatch: pytest.MonkeyPatch, address: str):
    monkeypatch.delattr(socket, "getaddrinfo")
    assert resolve(address) == [address]


@pytest.mark.parametrize("error", [socket.gaierror("no such name"), UnicodeError("label too long")])
def test_unknown_name_stays_unresolved(monkeypatch: pytest.MonkeyPatch, error: Exception):
    monkeypatch.setattr(socket, "getaddrinfo", raising(error))
    assert resolve("name:1") == ["name:1"]


# ---------------------------------------------------------------------- the process


def test_process_shares_its_knowledge_of_an_endpoint(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_all", {})
    assert module.replicas_of("a:1") is module.replicas_of("a:1")
    assert module.replicas_of("a:1") is not module.replicas_of("b:1")


def test_forked_child_does_not_wait_for_the_parents_lock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_all", {})
    known = module.replicas_of("a:1,b:1")
    known.learn(["b:1", "c:1"])
    with module._lock:
        child = os.fork()
        if child == 0:
            learned = module.replicas_of("a:1,b:1").known()
            os._exit(0 if learned == ["b:1", "c:1", "a:1"] else 1)
    assert os.waitpid(child, 0)[1] == 0
