"""The bounds of a run's store, and of all stores together."""

from muster.service.core.retention.retention import USE_RECORD_INTERVAL, Retention
from muster.service.core.store import ANSWER_BYTES, KEY_BYTES
from muster.service.core.vocabulary.effects import Refused
from muster.service.core.vocabulary.events import Disconnected, StoreRequest
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.operations import (
    Add,
    Append,
    CompareSet,
    Delete,
    Done,
    Flag,
    Get,
    Number,
    NumKeys,
    OperationId,
    Set,
    Value,
    Values,
    Wait,
)
from muster.service.core.vocabulary.records import StoreOperationRecord
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import of_kind
from tests.support.world.core_world import World
from tests.support.world.stores import Stores

# ---------------------------------------------------------------------- limits, not luck


def assert_limited(refusal, limit: str, value: int) -> None:
    assert refusal.reason is Reason.LIMIT_EXCEEDED
    assert refusal.metadata == {"limit": limit, "value": str(value)}
    assert f"raise {limit} on the coordinator" in refusal.message


def test_keys_of_a_run_are_bounded():
    stores = Stores(max_store_keys=2)
    stores.set(a=b"", b=b"")
    assert_limited(stores.refused(Add("c", 1)), "max_store_keys", 2)
    assert_limited(stores.refused(Set((("a", b"1"), ("c", b"")))), "max_store_keys", 2)
    assert stores.ask(Get(("a",), 1.0)) == Values((b"",))
    stores.ask(Delete("a"))
    assert stores.ask(Add("c", 1)) == Number(1)


def test_bytes_of_all_runs_are_bounded():
    most = 2 * (KEY_BYTES + 5)
    stores = Stores(max_total_store_bytes=most)
    for run in "ab":
        assert stores.ask(Set((("k", b"1234"),)), run) == Done()
    assert_limited(stores.refused(Set((("l", b""),)), "c"), "max_total_store_bytes", most)
    assert stores.world.coordinator.runs.keys() == {"a", "b"}
    # What is there may change and go.
    assert stores.ask(Set((("k", b"abcd"),)), "a") == Done()
    assert_limited(stores.refused(Append("k", b"0"), "b"), "max_total_store_bytes", most)
    # Calls that wait count as well.
    assert_limited(stores.refused(Wait(("later",), 1.0), "a"), "max_total_store_bytes", most)
    assert stores.ask(Delete("k"), "a") == Flag(True)
    assert stores.ask(Set((("k", b"12"),)), "c") == Done()


def test_kept_answers_count_towards_the_total():
    most = KEY_BYTES + ANSWER_BYTES + 20
    stores = Stores(max_total_store_bytes=most)
    assert stores.ask(Set((("k", b"12"),), OperationId("me", 1))) == Done()
    # One for each client, in the place of its last one, and as long as its value.
    assert stores.ask(CompareSet("k", b"12", b"34", OperationId("me", 2))) == Value(b"34")
    long = CompareSet("k", b"34", b"x" * 10, OperationId("me", 3))
    assert_limited(stores.refused(long), "max_total_store_bytes", most)
    for change in (Set((("k", b"34"),), OperationId("you", 1)), Delete("none", OperationId("you", 1))):
        assert_limited(stores.refused(change), "max_total_store_bytes", most)
    # Who frees room is not refused, nor who asks for nothing to be kept.
    assert stores.ask(CompareSet("k", b"34", b"56")) == Value(b"56")
    assert stores.ask(Delete("k", OperationId("you", 1))) == Flag(True)


def test_run_that_is_forgotten_leaves_its_room():
    world = World(
        limits=Limits(max_total_store_bytes=2 * (KEY_BYTES + ANSWER_BYTES)), retention=Retention(idle=60)
    )
    for number in range(3):
        change = Set((("k", b"1234567"),), OperationId("me", 1))
        answers = world.ask(StoreRequest(world.new_session(), f"run-{number}", change))
        assert answers == [Done()]
        assert world.coordinator.stored.bytes == KEY_BYTES + 8 + ANSWER_BYTES + 2
        if number == 1:
            world.crash()
            assert world.coordinator.stored.bytes == KEY_BYTES + 8 + ANSWER_BYTES + 2
        world.wait(3 * USE_RECORD_INTERVAL)
        assert not world.coordinator.runs
        assert world.coordinator.stored.bytes == 0


def test_calls_that_wait_leave_nothing_behind():
    stores = Stores()
    waits = [
        stores.wait(Wait(("later",), 60.0)),
        stores.wait(Get(("later", "k"), 60.0)),
        stores.wait(Get(("never",), 60.0)),
    ]
    assert stores.world.coordinator.stored.bytes > 0
    stores.set(later=b"", k=b"")
    stores.world.do(Disconnected(waits[2]))
    for key in ("later", "k"):
        stores.ask(Delete(key))
    assert stores.world.coordinator.stored.bytes == 0


def test_bytes_of_a_run_are_bounded():
    stores = Stores(max_store_bytes=10)
    assert stores.ask(Set((("k", b"123456789"),))) == Done()
    assert_limited(stores.refused(Append("k", b"0")), "max_store_bytes", 10)
    assert_limited(stores.refused(Set((("é", b""),))), "max_store_bytes", 10)
    assert stores.ask(Set((("k", b"1"), ("l", b"1234567")))) == Done()
    assert stores.store.bytes == 10


def test_bytes_of_one_answer_are_bounded():
    stores = Stores(max_store_bytes=10)
    stores.set(k=b"12345")
    assert stores.ask(Get(("k", "k"), 1.0)) == Values((b"12345",) * 2)
    assert_limited(stores.refused(Get(("k",) * 3, 1.0)), "max_store_bytes", 10)
    waiter = stores.wait(Get(("k", "k", "l"), 1.0))
    ((session, answer),) = stores.set(l=b"6")
    assert session == waiter
    assert_limited(of_kind(Refused, answer).refusal, "max_store_bytes", 10)


def test_too_large_value_or_key_is_refused():
    stores = Stores(max_store_value_bytes=4, max_store_key_bytes=3)
    assert stores.ask(Set((("abc", b"1234"),))) == Done()
    assert_limited(stores.refused(Append("abc", b"5")), "max_store_value_bytes", 4)
    assert_limited(stores.refused(CompareSet("abc", b"1234", b"12345")), "max_store_value_bytes", 4)
    assert_limited(stores.refused(Set((("éé", b""),))), "max_store_key_bytes", 3)
    assert_limited(stores.refused(Wait(("abcd",), 1.0)), "max_store_key_bytes", 3)


def test_too_many_clients_forget_the_least_recent_one():
    stores = Stores(max_store_clients=2)
    for client, number in [("a", 1), ("b", 1), ("a", 2), ("c", 1)]:
        stores.ask(Add("n", 1, OperationId(client, number)))
    assert set(stores.store._last_changes) == {"a", "c"}
    kept = stores.world.disk.of_kind(StoreOperationRecord)
    assert {record.client for record in kept} == {"a", "c"}


def test_least_recent_client_is_forgotten_first_after_a_restart():
    stores = Stores(max_store_clients=3)
    for client, number in [("z", 1), ("b", 1), ("a", 1), ("b", 2)]:
        stores.ask(Add("n", 1, OperationId(client, number)))
    for client in ("c", "d"):
        stores.world.crash()
        stores.ask(Add("n", 1, OperationId(client, 1)))
    assert list(stores.store._last_changes) == ["b", "c", "d"]
    assert stores.ask(Add("n", 1, OperationId("b", 2))) == Number(4), "it is carried out once"


def test_kept_answers_of_a_run_are_bounded():
    stores = Stores(max_store_bytes=100)
    stores.set(k=b"x" * 60)
    for client in "abc":
        stores.ask(CompareSet("k", b"other", b"", OperationId(client, 1)))
    assert set(stores.store._last_changes) == {"c"}


def test_waits_are_bounded():
    stores = Stores(max_store_waits=1)
    waiter = stores.wait(Wait(("k",), 10.0))
    assert_limited(stores.refused(Wait(("k",), 10.0)), "max_store_waits", 1)
    assert stores.set(k=b"1") == [(waiter, Done())]


def test_runs_are_bounded():
    stores = Stores(max_runs=1)
    stores.set(k=b"1")
    assert_limited(stores.refused(NumKeys(), run="other"), "max_runs", 1)
    assert stores.ask(NumKeys()) == Number(1)
