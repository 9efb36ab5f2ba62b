"""Whom to call next, on a clock and with a resolver of the test's own."""

import os
import socket
from collections.abc import Callable, Iterable

import pytest

from muster.client import replicas as module
from muster.client.replicas import HELD, MOST_FOLLOWED, SHUNNED_FOR, Replicas, Search, resolve

LIST = "a:1,b:1,c:1"


class World:
    """A clock, a resolver, and what is known of one endpoint."""

    def __init__(self, endpoint: str = LIST, **names: list[str]) -> None:
        self.now = 100.0
        self.names = {f"{name}:1": addresses for name, addresses in names.items()}
        self.looked_up: list[str] = []
        self.replicas = Replicas(endpoint, lambda: self.now, self._resolve)

    def _resolve(self, address: str) -> list[str]:
        self.looked_up.append(address)
        return self.names.get(address, [address])

    def search(self) -> "Caller":
        return Caller(self)


class Caller:
    """One that searches; its pauses move the clock."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.search = Search(world.replicas)

    @property
    def calls(self) -> str:
        return self.search.target.address

    @property
    def header(self) -> str:
        ((name, value),) = self.search.metadata
        assert name == "muster-not-leader"
        return value

    def then(self, pause: float) -> tuple[str, bool]:
        """Whom it calls next, and whether it pauses before."""
        self._world.now += pause
        self.search.begin()
        return self.calls, pause > 0

    def failed(self) -> tuple[str, bool]:
        return self.then(self.search.failed("refused"))

    def stands_by(self, leader: str = "", replicas: Iterable[str] = (), took: float = 0) -> tuple[str, bool]:
        self._world.now += took
        return self.then(self.search.not_leader(leader, replicas, "stands by"))


@pytest.fixture
def world() -> World:
    return World()


# ---------------------------------------------------------------------- one address


def test_one_address_is_called_again_after_pauses_that_grow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "jittered", lambda seconds, least, most: seconds * most)
    search = World("a:1").search().search
    pauses = [search.failed("refused") for _ in range(7)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert search.target == module.Target("a:1", "", 5_000, 3_333)
    search.answered()
    assert search.failed("lost") == 0.1


def test_pauses_are_jittered():
    assert 0.05 <= World("a:1").search().search.failed("refused") <= 0.1


def test_one_address_that_answers_is_looked_up_by_grpc_alone():
    world = World("name:1", name=["10.0.0.1:1", "10.0.0.2:1"])
    caller = world.search()
    caller.search.answered()
    assert (caller.calls, world.looked_up) == ("name:1", [])


# ---------------------------------------------------------------------- turns


def test_who_does_not_answer_is_followed_by_the_next_at_once_and_a_turn_by_a_pause(world: World):
    caller = world.search()
    assert caller.calls == "a:1"
    assert [caller.failed() for _ in range(3)] == [("b:1", False), ("c:1", False), ("a:1", True)]
    assert [caller.failed() for _ in range(3)] == [("b:1", False), ("c:1", False), ("a:1", True)]


def test_who_answers_is_called_first_from_then_on_by_everyone(world: World):
    caller = world.search()
    caller.failed()
    caller.search.answered()
    assert world.search().calls == "b:1"


def test_a_connection_that_broke_is_opened_again_before_another_is_called(world: World):
    caller = world.search()
    caller.search.answered()
    assert caller.failed() == ("a:1", True)
    assert caller.header == "", "it may be there all the same"
    assert caller.failed() == ("b:1", False)
    assert caller.header == "a:1"


def test_who_has_just_fallen_silent_is_asked_once_more_and_not_for_long(world: World):
    caller = world.search()
    caller.search.answered()
    waits = []
    for _ in range(3):
        caller.failed()
        waits.append((caller.calls, caller.search.target.connect_timeout_ms))
    assert waits == [("a:1", 500), ("b:1", 2_000), ("c:1", 2_000)]


def test_who_answers_when_asked_once_more_gets_the_usual_time_again(world: World):
    caller = world.search()
    caller.search.answered()
    caller.failed()
    caller.search.answered()
    assert caller.search.target.connect_timeout_ms == 2_000


def test_the_only_coordinator_has_all_its_time_to_connect():
    caller = World("a:1").search()
    caller.search.answered()
    assert caller.failed() == ("a:1", True)
    assert caller.search.target.connect_timeout_ms == 5_000


def test_the_next_operation_knows_that_the_leader_was_in_touch(world: World):
    world.search().search.answered()
    caller = world.search()
    assert caller.failed() == ("a:1", True)
    assert caller.failed() == ("b:1", False)
    # Who searches now has not heard from it either.
    assert world.search().calls == "b:1"


def test_who_says_that_it_stops_is_left_at_once(world: World):
    caller = world.search()
    caller.search.answered()
    assert caller.then(caller.search.left("draining")) == ("b:1", False)
    assert caller.header == "a:1"


def test_who_is_silent_comes_last_until_that_is_long_ago(world: World):
    caller = world.search()
    caller.failed()
    assert world.search().calls == "b:1", "a short operation after another must not meet the same dead one"
    world.now += SHUNNED_FOR
    assert world.search().calls == "a:1"


def test_a_call_that_failed_through_no_fault_of_the_replica_is_made_again_there(world: World):
    caller = world.search()
    assert caller.then(caller.search.again("MUSTER_TOKEN_FILE cannot be read")) == ("a:1", True)


# ---------------------------------------------------------------------- standbys


def test_the_leader_that_is_named_is_called_at_once(world: World):
    caller = world.search()
    assert caller.stands_by("c:1") == ("c:1", False)
    caller.search.answered()
    assert world.search().calls == "c:1"


def test_a_leader_that_was_not_given_is_called_too(world: World):
    assert world.search().stands_by("elsewhere:9") == ("elsewhere:9", False)


@pytest.mark.parametrize("named", ["", "nonsense", "x:0", "x:99999", "x:" + "9" * 5_000])
def test_a_standby_that_names_nobody_is_followed_by_the_next(world: World, named: str):
    assert world.search().stands_by(named) == ("b:1", False)


def test_the_leader_that_did_not_answer_is_not_called_on_a_standbys_word(world: World):
    caller = world.search()
    caller.search.answered()
    caller.failed()
    caller.failed()
    assert caller.header == "a:1"
    assert caller.stands_by("a:1") == ("c:1", False)
    assert caller.stands_by("a:1") == ("a:1", True), "when all have been asked it is: it may be back"


def test_another_leader_ends_the_shunning(world: World):
    caller = world.search()
    caller.search.answered()
    caller.failed()
    caller.failed()
    assert caller.stands_by("c:1") == ("c:1", False)
    assert caller.header == ""


def test_the_shunning_ends_with_time(world: World):
    caller = world.search()
    caller.search.answered()
    caller.failed()
    caller.failed()
    assert caller.stands_by("a:1", took=SHUNNED_FOR) == ("a:1", False)


def test_a_leader_that_answers_is_not_shunned_any_more(world: World):
    caller = world.search()
    caller.search.answered()
    caller.failed()
    caller.failed()
    caller.stands_by("a:1")
    caller.stands_by("a:1")
    caller.search.answered()
    assert (caller.header, caller.calls) == ("", "a:1")


def test_one_that_was_silent_is_called_when_it_is_named_the_new_leader(world: World):
    """A standby that takes over ends the calls that it held."""
    caller = world.search()
    caller.search.answered()
    caller.failed()
    assert caller.failed() == ("b:1", False)
    assert caller.failed() == ("c:1", False)
    assert caller.stands_by("b:1") == ("b:1", False)


def test_a_call_that_failed_before_its_replica_led_says_nothing_against_it(world: World):
    """Who takes over lets go of its port for a moment; others have found it already."""
    early = world.search()
    early.search.begin()
    world.now += 0.1
    late = world.search()
    late.failed()
    late.stands_by("a:1")
    late.search.answered()
    assert early.failed() == ("b:1", False)
    assert early.header == ""
    assert early.stands_by("a:1") == ("a:1", False)


def test_one_that_has_just_been_elected_may_name_itself(world: World):
    assert world.search().stands_by("a:1") == ("a:1", False)


def test_two_that_name_each_other_are_left_after_one_look_at_each(world: World):
    caller = world.search()
    assert caller.stands_by("b:1") == ("b:1", False)
    assert caller.stands_by("a:1") == ("a:1", False)
    assert caller.stands_by("b:1") == ("c:1", False)
    assert caller.stands_by("b:1") == ("b:1", True)


def test_one_that_names_ever_others_is_not_followed_for_ever(world: World):
    caller = world.search()
    hops = 0
    while not caller.stands_by(f"made-up:{hops + 1}")[1]:
        hops += 1
        assert hops < MOST_FOLLOWED + 5


def test_one_that_names_ever_other_replicas_is_not_asked_for_ever(world: World):
    caller = world.search()
    hops = 0
    while not caller.stands_by(replicas=[f"made-up:{hops + 1}"])[1]:
        hops += 1
        assert hops < module.MOST_REPLICAS + 5


def test_who_says_that_it_does_not_lead_is_no_leader_any_more(world: World):
    world.search().search.answered()
    caller = world.search()
    assert caller.stands_by() == ("b:1", False)
    assert caller.header == "", "it did answer"


def test_a_turn_that_standbys_have_held_needs_no_long_pause(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "jittered", lambda seconds, least, most: seconds * most)
    caller = world.search()

    def turn(took: float) -> float:
        for _ in range(2):
            assert caller.stands_by(took=took)[1] is False
        world.now += took
        return caller.search.not_leader("", (), "stands by")

    assert [turn(0.01) for _ in range(3)] == [0.1, 0.2, 0.4]
    world.now += 0.4
    assert turn(HELD) == 0.1


# ---------------------------------------------------------------------- what is learned


def test_all_replicas_that_a_standby_knows_are_called_in_the_same_turn():
    caller = World("a:1").search()
    assert caller.stands_by(replicas=["b:1", "c:1"]) == ("b:1", False)
    assert caller.failed() == ("c:1", False)
    assert caller.failed() == ("a:1", True), "the only one that answers"


def test_what_was_given_is_called_when_none_of_those_that_were_learned_answers():
    world = World("service:1")
    world.replicas.learn(["x:1", "y:1"])
    caller = world.search()
    assert [caller.calls, caller.failed(), caller.failed(), caller.failed()] == [
        "x:1",
        ("y:1", False),
        ("service:1", False),
        ("x:1", True),
    ]


def test_the_last_word_on_the_replicas_counts_and_an_empty_one_says_nothing(world: World):
    world.replicas.learn(["x:1"])
    world.replicas.learn(["y:1"])
    world.replicas.learn([])
    world.replicas.learn(["", "nonsense"])
    assert world.replicas.known() == ["y:1", "a:1", "b:1", "c:1"]


def test_no_more_are_learned_than_anyone_runs(world: World):
    world.replicas.learn(f"x:{port}" for port in range(1, 5_000))
    assert len(world.replicas.known()) == module.MOST_REPLICAS + 3


def test_among_several_nobody_is_waited_for_for_long():
    world = World("a:1")
    caller = world.search()
    assert (caller.search.target.connect_timeout_ms, caller.search.target.keepalive_ms) == (5_000, 3_333)
    world.replicas.learn(["a:1", "b:1"])
    assert (caller.search.target.connect_timeout_ms, caller.search.target.keepalive_ms) == (2_000, 1_667)


@pytest.mark.parametrize(
    ("endpoint", "told", "used"), [("a:1", 900, 900), (LIST, 900, 900), (LIST, 9_000, 3_333)]
)
def test_the_keepalive_is_what_the_coordinator_asks_for(endpoint: str, told: int, used: int):
    world = World(endpoint)
    world.replicas.learn([], told)
    world.replicas.learn([], 0)
    assert world.search().search.target.keepalive_ms == used


# ---------------------------------------------------------------------- names


def test_the_addresses_of_a_name_are_called_when_the_name_itself_did_not_do():
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


def test_certificate_of_learned_address_names_its_host_where_only_sockets_were_configured():
    world = World("unix:///run/muster/relay.sock")
    world.replicas.learn(["told:1"])
    assert world.replicas.target("told:1").tls_name == ""


def test_a_name_of_one_address_is_used_as_it_is():
    world = World("name:1", name=["10.0.0.1:1"])
    caller = world.search()
    assert caller.failed() == ("name:1", True)
    assert caller.search.target == module.Target("name:1")


def test_a_name_is_looked_up_anew_in_each_turn():
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


def test_a_machine_with_an_address_of_each_family_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "getaddrinfo", found((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")))
    assert resolve("localhost:7550") == ["[::1]:7550"]


@pytest.mark.parametrize("address", ["10.0.0.1:1", "[::1]:1"])
def test_what_is_no_name_is_not_looked_up(monkeypatch: pytest.MonkeyPatch, address: str):
    monkeypatch.delattr(socket, "getaddrinfo")
    assert resolve(address) == [address]


@pytest.mark.parametrize("error", [socket.gaierror("no such name"), UnicodeError("label too long")])
def test_a_name_that_cannot_be_found_stays_what_it_is(monkeypatch: pytest.MonkeyPatch, error: Exception):
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert resolve("name:1") == ["name:1"]


# ---------------------------------------------------------------------- relays

RELAYED = "a:1,unix:///r,b:1"


def test_a_relay_is_called_before_all_others_wherever_it_stands():
    caller = World(RELAYED).search()
    assert caller.calls == "unix:///r"
    turn = [("a:1", False), ("b:1", False), ("unix:///r", True)]
    assert [caller.failed() for _ in range(3)] == turn


def test_it_is_called_before_a_leader_that_is_known_unless_it_is_silent():
    world = World(RELAYED)
    caller = world.search()
    caller.failed()
    caller.search.answered()
    assert world.search().calls == "a:1"
    world.now += SHUNNED_FOR
    assert world.search().calls == "unix:///r"
    assert caller.calls == "a:1", "who has a stream keeps it"


def test_it_is_left_at_once_for_a_socket_loses_nothing_on_its_way():
    world = World(RELAYED)
    caller = world.search()
    caller.search.answered()
    assert caller.failed() == ("a:1", False)
    assert world.search().calls == "a:1"


def test_a_stream_that_it_ends_without_a_word_is_opened_elsewhere():
    caller = World(RELAYED).search()
    caller.search.answered()
    assert caller.then(caller.search.ended("ended")) == ("a:1", False)
    caller.search.answered()
    assert caller.then(caller.search.ended("ended")) == ("a:1", True)


def test_that_a_relay_answers_says_nothing_of_who_leads():
    world = World(RELAYED)
    caller = world.search()
    caller.failed()
    caller.search.answered()
    world.now += SHUNNED_FOR
    late = world.search()
    late.search.answered()
    late.failed()
    assert (late.calls, late.header) == ("a:1", "")


def test_nobody_is_waited_for_for_long_and_it_least_of_all():
    caller = World("unix:///r").search()
    assert caller.search.target == module.Target("unix:///r", "", 1_000, 3_333)
    caller = World(RELAYED).search()
    waits = [caller.search.target.connect_timeout_ms]
    for _ in range(2):
        caller.failed()
        waits.append(caller.search.target.connect_timeout_ms)
    assert waits == [1_000, 2_000, 2_000]


def test_a_socket_is_never_looked_up():
    world = World("unix:///r,a:1", a=["10.0.0.1:1", "10.0.0.2:1"])
    caller = world.search()
    assert [caller.failed()[0] for _ in range(3)] == ["a:1", "10.0.0.1:1", "10.0.0.2:1"]
    assert world.looked_up == ["a:1"]
    assert "unix:///r" in world.replicas.known()


@pytest.mark.parametrize("named", ["unix:///elsewhere", "unix:///r"])
def test_nobody_sends_us_to_a_socket(named: str):
    world = World("a:1,unix:///r")
    caller = world.search()
    caller.failed()
    assert caller.stands_by(named, ["b:1", named]) == ("b:1", False)
    assert world.replicas.known() == ["b:1", "a:1", "unix:///r"]


def test_when_the_only_relay_is_gone_those_are_called_that_were_named_through_it():
    world = World("unix:///r")
    caller = world.search()
    assert caller.failed() == ("unix:///r", True)
    world.replicas.learn(["a:1"])
    caller.search.answered()
    assert caller.failed() == ("a:1", False)


def test_who_cannot_be_called_with_what_we_have_is_left_where_there_is_a_relay(world: World):
    caller = World("unix:///r,a:1").search()
    caller.failed()
    assert caller.then(caller.search.denied("no token")) == ("a:1", True)
    caller._world.now += SHUNNED_FOR
    assert caller.then(caller.search.denied("no token")) == ("unix:///r", False)
    assert caller.header == "", "it did answer"
    caller = world.search()
    assert caller.then(caller.search.denied("no token")) == ("a:1", True)


# ---------------------------------------------------------------------- words


def test_what_was_said_names_each_address_and_its_last_word(world: World):
    caller = world.search()
    assert caller.search.said == "a:1 has not answered yet"
    caller.failed()
    caller.stands_by()
    assert caller.search.said == "a:1: refused; b:1: stands by"
    caller.search.answered()
    caller.failed()
    assert caller.search.said == "c:1: refused"


def test_one_address_needs_no_name():
    caller = World("a:1").search()
    caller.failed()
    assert caller.search.said == "refused"


# ---------------------------------------------------------------------- the process


def test_a_process_knows_one_thing_of_an_endpoint(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_all", {})
    assert module.replicas_of("a:1") is module.replicas_of("a:1")
    assert module.replicas_of("a:1") is not module.replicas_of("b:1")


def test_a_child_that_is_forked_while_another_thread_looks_is_not_stuck(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_all", {})
    known = module.replicas_of("a:1,b:1")
    known.learn(["b:1", "c:1"])
    with module._lock:
        child = os.fork()
        if child == 0:
            learned = module.replicas_of("a:1,b:1").known()
            os._exit(0 if learned == ["b:1", "c:1", "a:1"] else 1)
    assert os.waitpid(child, 0)[1] == 0
