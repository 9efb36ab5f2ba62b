"""A search calls relays before all other addresses, and leaves them at once."""

import pytest

from muster.client import replicas as module
from muster.client.replicas import SILENT_BACKOFF
from tests.unit.client.search_world import World


@pytest.fixture
def world() -> World:
    return World()


# ---------------------------------------------------------------------- relays

RELAYED = "a:1,unix:///r,b:1"


def test_relay_is_called_first_wherever_it_stands():
    caller = World(RELAYED).search()
    assert caller.calls == "unix:///r"
    turn = [("a:1", False), ("b:1", False), ("unix:///r", True)]
    assert [caller.failed() for _ in range(3)] == turn


def test_relay_is_called_before_the_leader_unless_silent():
    world = World(RELAYED)
    caller = world.search()
    caller.failed()
    caller.search.answered()
    assert world.search().calls == "a:1"
    world.now += SILENT_BACKOFF
    assert world.search().calls == "unix:///r"
    assert caller.calls == "a:1", "who has a stream keeps it"


def test_relay_that_fails_is_left_at_once():
    world = World(RELAYED)
    caller = world.search()
    caller.search.answered()
    assert caller.failed() == ("a:1", False)
    assert world.search().calls == "a:1"


def test_stream_that_a_relay_ends_without_a_status_is_moved():
    caller = World(RELAYED).search()
    caller.search.answered()
    assert caller.then(caller.search.ended("ended")) == ("a:1", False)
    caller.search.answered()
    assert caller.then(caller.search.ended("ended")) == ("a:1", True)


def test_answer_of_a_relay_does_not_change_the_leader():
    world = World(RELAYED)
    caller = world.search()
    caller.failed()
    caller.search.answered()
    world.now += SILENT_BACKOFF
    late = world.search()
    late.search.answered()
    late.failed()
    assert (late.calls, late.header) == ("a:1", "")


def test_relay_has_the_shortest_connect_timeout():
    caller = World("unix:///r").search()
    assert caller.search.target == module.Target("unix:///r", "", 1_000, 3_333)
    caller = World(RELAYED).search()
    waits = [caller.search.target.connect_timeout_ms]
    for _ in range(2):
        caller.failed()
        waits.append(caller.search.target.connect_timeout_ms)
    assert waits == [1_000, 2_000, 2_000]


def test_socket_is_never_resolved():
    world = World("unix:///r,a:1", a=["10.0.0.1:1", "10.0.0.2:1"])
    caller = world.search()
    assert [caller.failed()[0] for _ in range(3)] == ["a:1", "10.0.0.1:1", "10.0.0.2:1"]
    assert world.looked_up == ["a:1"]
    assert "unix:///r" in world.replicas.known()


@pytest.mark.parametrize("named", ["unix:///elsewhere", "unix:///r"])
def test_socket_named_by_a_coordinator_is_ignored(named: str):
    world = World("a:1,unix:///r")
    caller = world.search()
    caller.failed()
    assert caller.stands_by(named, ["b:1", named]) == ("b:1", False)
    assert world.replicas.known() == ["b:1", "a:1", "unix:///r"]


def test_replicas_learned_through_a_relay_are_called_when_it_is_gone():
    world = World("unix:///r")
    caller = world.search()
    assert caller.failed() == ("unix:///r", True)
    world.replicas.learn(["a:1"])
    caller.search.answered()
    assert caller.failed() == ("a:1", False)


def test_address_that_refuses_the_token_is_left_for_a_relay(world: World):
    caller = World("unix:///r,a:1").search()
    caller.failed()
    assert caller.then(caller.search.denied("no token")) == ("a:1", True)
    caller._world.now += SILENT_BACKOFF
    assert caller.then(caller.search.denied("no token")) == ("unix:///r", False)
    assert caller.header == "", "it did answer"
    caller = world.search()
    assert caller.then(caller.search.denied("no token")) == ("a:1", True)
