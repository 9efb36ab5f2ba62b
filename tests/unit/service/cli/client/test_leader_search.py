"""Whom the command calls next."""

import socket
from collections.abc import Callable

import pytest

from muster.service.cli.client.leader_search import MOST_FOLLOWED, MOST_REPLICAS, Replicas, Search

LIST = "a:1,b:1,c:1"


@pytest.fixture(autouse=True)
def _no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", fail)


@pytest.fixture
def replicas() -> Replicas:
    return Replicas(LIST)


def turn(search: Search, more: Callable[[], bool]) -> list[str]:
    """Everyone who is called until the turn is over."""
    called = [search.address]
    while more():
        called.append(search.address)
    return called


def test_everyone_is_called_once_in_a_turn(replicas: Replicas):
    search = Search(replicas)
    assert turn(search, lambda: search.failed("refused")) == ["a:1", "b:1", "c:1"]
    assert search.words == dict.fromkeys(["a:1", "b:1", "c:1"], "refused")
    search.begin_turn()
    assert turn(search, lambda: search.failed("refused")) == ["a:1", "b:1", "c:1"]


def test_who_answers_is_called_first_from_then_on(replicas: Replicas):
    replicas.answers("c:1")
    search = Search(replicas)
    assert turn(search, lambda: search.failed("refused")) == ["c:1", "a:1", "b:1"]


def test_the_leader_that_is_named_is_called_at_once(replicas: Replicas):
    search = Search(replicas)
    assert search.not_leader("c:1", [], "stands by")
    assert (search.address, search.followed, search.met_standby) == ("c:1", True, True)


def test_all_that_a_standby_knows_are_called():
    search = Search(Replicas("a:1"))
    assert turn(search, lambda: search.not_leader("", ["b:1", "c:1", "no address", ""], "stands by")) == [
        "a:1",
        "b:1",
        "c:1",
    ]


def test_the_leader_that_did_not_answer_comes_last_and_not_on_a_standbys_word(replicas: Replicas):
    replicas.answers("a:1")
    search = Search(replicas)
    assert search.metadata == (("muster-not-leader", ""),)
    assert search.failed("refused")
    assert search.metadata == (("muster-not-leader", "a:1"),)
    assert search.not_leader("a:1", [], "stands by")
    assert search.address == "c:1"
    search.begin_turn()
    assert turn(search, lambda: search.failed("refused")) == ["b:1", "c:1", "a:1"]


@pytest.mark.parametrize(
    ("leader", "also"),
    [
        (lambda hops: f"b:{1 + hops % 2}", lambda _: []),
        (lambda hops: f"x:{hops + 1}", lambda _: []),
        (lambda _: "", lambda hops: [f"x:{hops + 1}"]),
        (lambda hops: f"x:{hops + 1}", lambda hops: [f"y:{hops + 1}"]),
    ],
)
def test_no_turn_is_endless(
    replicas: Replicas, leader: Callable[[int], str], also: Callable[[int], list[str]]
):
    search = Search(replicas)
    hops = 0
    while search.not_leader(leader(hops), also(hops), "stands by"):
        hops += 1
        assert hops < MOST_FOLLOWED + MOST_REPLICAS + 5


def test_a_name_stands_for_its_addresses_once_it_has_not_done_itself(monkeypatch: pytest.MonkeyPatch):
    hosts = [(socket.AF_INET, "10.0.0.1"), (socket.AF_INET, "10.0.0.2"), (socket.AF_INET6, "::1")]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(family, 1, 6, "", (host, 1)) for family, host in hosts]
    )
    replicas = Replicas("name:1")
    search = Search(replicas)
    assert not replicas.several
    assert turn(search, lambda: search.failed("refused")) == ["name:1", "10.0.0.1:1", "10.0.0.2:1"]
    assert [replicas.tls_name(one) for one in ("name:1", "10.0.0.1:1", "told:1")] == ["", "name", "name"]
    hosts[1:] = []
    alone = Replicas("name:1")
    search = Search(alone)
    assert turn(search, lambda: search.failed("refused")) == ["name:1"]


def test_an_endpoint_is_one_address_or_several():
    assert Replicas(" a:1, b:1 ,a:1,[::1]:7550").given == ["a:1", "b:1", "[::1]:7550"]


@pytest.mark.parametrize(("endpoint", "bad"), [("a", "a"), ("a:1,b", "b"), ("a:1,", ""), ("a:1,b:x", "b:x")])
def test_the_part_that_is_no_address_is_named(endpoint: str, bad: str):
    with pytest.raises(ValueError, match=f'"{bad}" is not HOST:PORT'):
        Replicas(endpoint)
