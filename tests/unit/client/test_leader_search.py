"""Which coordinator a search calls next, and when."""

import pytest

from muster.client import replicas as module
from muster.client.replicas import EARLY_TIME, MAX_FOLLOWED, SILENT_BACKOFF, STANDBY_HOLD
from tests.unit.client.search_world import World


@pytest.fixture
def world() -> World:
    return World()


# ---------------------------------------------------------------------- one address


def test_one_address_is_called_again_after_growing_pauses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "jittered", lambda seconds, least, most: seconds * most)
    world = World("a:1")
    search = world.search().search
    pauses = [search.failed("refused") for _ in range(5)]
    world.now += EARLY_TIME
    pauses += [search.failed("refused") for _ in range(2)]
    assert pauses == [0.1, 0.2, 0.4, 0.5, 0.5, 1.0, 1.0]
    assert search.target == module.Target("a:1", "", 5_000, 3_333)
    search.answered()
    assert search.failed("lost") == 0.1


def test_pauses_are_jittered():
    assert 0.05 <= World("a:1").search().search.failed("refused") <= 0.1


def test_one_address_that_answers_is_resolved_by_grpc_alone():
    world = World("name:1", name=["10.0.0.1:1", "10.0.0.2:1"])
    caller = world.search()
    caller.search.answered()
    assert (caller.calls, world.looked_up) == ("name:1", [])


# ---------------------------------------------------------------------- turns


def test_next_address_is_called_at_once_and_a_turn_ends_with_a_pause(world: World):
    caller = world.search()
    assert caller.calls == "a:1"
    assert [caller.failed() for _ in range(3)] == [("b:1", False), ("c:1", False), ("a:1", True)]
    assert [caller.failed() for _ in range(3)] == [("b:1", False), ("c:1", False), ("a:1", True)]


def test_address_that_answered_is_called_first_by_all_searches(world: World):
    caller = world.search()
    caller.failed()
    caller.search.answered()
    assert world.search().calls == "b:1"


def test_broken_connection_is_tried_again_before_another_address(world: World):
    caller = world.search()
    caller.search.answered()
    assert caller.failed() == ("a:1", True)
    assert caller.header == "", "it may be there all the same"
    assert caller.failed() == ("b:1", False)
    assert caller.header == "a:1"


def test_silent_leader_is_called_once_more_with_a_short_timeout(world: World):
    caller = world.search()
    caller.search.answered()
    waits = []
    for _ in range(3):
        caller.failed()
        waits.append((caller.calls, caller.search.target.connect_timeout_ms))
    assert waits == [("a:1", 500), ("b:1", 2_000), ("c:1", 2_000)]


def test_leader_that_answers_again_gets_the_usual_timeout(world: World):
    caller = world.search_after_failure()
    caller.search.answered()
    assert caller.search.target.connect_timeout_ms == 2_000


def test_only_coordinator_has_the_full_connect_timeout():
    caller = World("a:1").search()
    caller.search.answered()
    assert caller.failed() == ("a:1", True)
    assert caller.search.target.connect_timeout_ms == 5_000


def test_next_search_tries_a_leader_that_answered_once_more(world: World):
    world.search().search.answered()
    caller = world.search()
    assert caller.failed() == ("a:1", True)
    assert caller.failed() == ("b:1", False)
    # Who searches now has not heard from it either.
    assert world.search().calls == "b:1"


def test_stopping_leader_is_left_at_once(world: World):
    caller = world.search()
    caller.search.answered()
    assert caller.then(caller.search.left("draining")) == ("b:1", False)
    assert caller.header == "a:1"


def test_silent_address_is_called_last_for_a_while(world: World):
    caller = world.search()
    caller.failed()
    assert world.search().calls == "b:1", "a short operation after another must not meet the same dead one"
    world.now += SILENT_BACKOFF
    assert world.search().calls == "a:1"


def test_address_without_fault_is_called_again(world: World):
    caller = world.search()
    assert caller.then(caller.search.again("MUSTER_TOKEN_FILE cannot be read")) == ("a:1", True)


# ---------------------------------------------------------------------- standbys


def test_named_leader_is_called_at_once(world: World):
    caller = world.search()
    assert caller.stands_by("c:1") == ("c:1", False)
    caller.search.answered()
    assert world.search().calls == "c:1"


def test_named_leader_outside_the_endpoint_is_called(world: World):
    assert world.search().stands_by("elsewhere:9") == ("elsewhere:9", False)


@pytest.mark.parametrize("named", ["", "nonsense", "x:0", "x:99999", "x:" + "9" * 5_000])
def test_next_address_follows_a_standby_that_names_no_leader(world: World, named: str):
    assert world.search().stands_by(named) == ("b:1", False)


def test_silent_leader_is_not_called_when_a_standby_names_it(world: World):
    caller = world.search_after_failure()
    caller.failed()
    assert caller.header == "a:1"
    assert caller.stands_by("a:1") == ("c:1", False)
    assert caller.stands_by("a:1") == ("a:1", True), "when all have been asked it is: it may be back"


def test_silent_leader_is_called_after_a_standby_has_held_the_call_and_names_it(world: World):
    """It may be back, and it waits for its processes no longer than the reset grace."""
    caller = world.search_after_failure()
    caller.failed()
    assert caller.stands_by("a:1", took=2 * STANDBY_HOLD) == ("a:1", False)
    assert caller.search.target.connect_timeout_ms == 500, "another one may lead meanwhile"
    assert caller.failed() == ("c:1", False)
    assert caller.header == "a:1"
    assert caller.stands_by("a:1", took=2 * STANDBY_HOLD) == ("a:1", True)


def test_another_leader_ends_the_backoff(world: World):
    caller = world.search_after_failure()
    caller.failed()
    assert caller.stands_by("c:1") == ("c:1", False)
    assert caller.header == ""


def test_leader_backoff_ends_with_time(world: World):
    caller = world.search_after_failure()
    caller.failed()
    assert caller.stands_by("a:1", took=SILENT_BACKOFF) == ("a:1", False)


def test_answer_of_the_leader_ends_its_backoff(world: World):
    caller = world.search_after_failure()
    caller.failed()
    caller.stands_by("a:1")
    caller.stands_by("a:1")
    caller.search.answered()
    assert (caller.header, caller.calls) == ("", "a:1")


def test_silent_address_is_called_when_named_as_the_new_leader(world: World):
    """A standby that takes over ends the calls that it held."""
    caller = world.search_after_failure()
    assert caller.failed() == ("b:1", False)
    assert caller.failed() == ("c:1", False)
    assert caller.stands_by("b:1") == ("b:1", False)


def test_failure_from_before_a_leaders_term_does_not_count(world: World):
    """A standby that takes over closes its port for a moment; other searches have found it already."""
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


def test_new_leader_may_name_itself(world: World):
    assert world.search().stands_by("a:1") == ("a:1", False)


def test_two_standbys_that_name_each_other_are_called_once_each(world: World):
    caller = world.search()
    assert caller.stands_by("b:1") == ("b:1", False)
    assert caller.stands_by("a:1") == ("a:1", False)
    assert caller.stands_by("b:1") == ("c:1", False)
    assert caller.stands_by("b:1") == ("b:1", True)


def test_ever_new_leaders_are_not_followed_for_ever(world: World):
    caller = world.search()
    hops = 0
    while not caller.stands_by(f"made-up:{hops + 1}")[1]:
        hops += 1
        assert hops < MAX_FOLLOWED + 5


def test_ever_new_replicas_do_not_prolong_a_turn_for_ever(world: World):
    caller = world.search()
    hops = 0
    while not caller.stands_by(replicas=[f"made-up:{hops + 1}"])[1]:
        hops += 1
        assert hops < module.MAX_REPLICAS + 5


def test_leader_that_stands_by_is_no_leader_any_more(world: World):
    world.search().search.answered()
    caller = world.search()
    assert caller.stands_by() == ("b:1", False)
    assert caller.header == "", "it did answer"


def test_turn_held_by_standbys_ends_with_a_short_pause(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "jittered", lambda seconds, least, most: seconds * most)
    caller = world.search()

    def turn(took: float) -> float:
        for _ in range(2):
            assert caller.stands_by(took=took)[1] is False
        world.now += took
        return caller.search.not_leader("", (), "stands by")

    assert [turn(0.01) for _ in range(3)] == [0.1, 0.2, 0.4]
    world.now += 0.4
    assert turn(STANDBY_HOLD) == 0.1


# ---------------------------------------------------------------------- errors


def test_summary_names_each_address_with_its_last_error(world: World):
    caller = world.search()
    assert caller.search.said == "a:1 has not answered yet"
    caller.failed()
    caller.stands_by()
    assert caller.search.said == "a:1: refused; b:1: stands by"
    caller.search.answered()
    caller.failed()
    assert caller.search.said == "c:1: refused"


def test_summary_of_one_address_does_not_name_it():
    caller = World("a:1").search()
    caller.failed()
    assert caller.search.said == "refused"
