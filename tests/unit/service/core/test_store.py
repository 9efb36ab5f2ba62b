"""A run's store: torch's semantics, each change once, waits that end by their keys or at their deadline."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.distributed import HashStore

from muster.service.core.store import Waiter
from muster.service.core.vocabulary.effects import Refused
from muster.service.core.vocabulary.events import Disconnected, StoreRequest
from muster.service.core.vocabulary.operations import (
    Add,
    Append,
    Check,
    CompareSet,
    Delete,
    DeletePrefix,
    Done,
    Flag,
    Get,
    Keys,
    ListKeys,
    Number,
    NumKeys,
    Operation,
    OperationId,
    Set,
    Value,
    Values,
    Wait,
)
from muster.service.core.vocabulary.records import StoreKeyRecord, StoreOperationRecord
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN
from tests.support.world.stores import Stores


@pytest.fixture
def stores() -> Stores:
    return Stores()


# ---------------------------------------------------------------------- torch's semantics


KEYS = st.sampled_from(["a", "b", "c\0d", "", "é"])
VALUES = st.sampled_from([b"", b"0", b"-7", b"41", b"x", b"\0\xff"])


class BesideHashStore(RuleBasedStateMachine):
    """What does not wait gives what torch's HashStore gives, also sent again or after a restart."""

    def __init__(self) -> None:
        super().__init__()
        self.stores = Stores()
        self.oracle: Any = HashStore()
        """Torch's stubs leave half of it out."""
        self.number = 0
        self.last: tuple[Operation, object] | None = None

    def id(self) -> OperationId:
        self.number += 1
        return OperationId("client", self.number)

    def do(self, change) -> object:
        answer = self.stores.ask(change)
        self.last = (change, answer)
        return answer

    @rule(entries=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=3))
    def set(self, entries):
        self.oracle.multi_set([key for key, _ in entries], [value for _, value in entries])
        assert self.do(Set(tuple(entries), self.id())) == Done()

    @rule(key=KEYS, amount=st.integers(-100, 100))
    def add(self, key, amount):
        present = self.oracle.get(key) if self.oracle.check([key]) else b""
        assume(present.removeprefix(b"-").isdigit() or not present.strip(b"x\0\xff"))
        try:
            expected = self.oracle.add(key, amount)
        except ValueError:
            refused = self.stores.refused(Add(key, amount, self.id()))
            assert refused.reason is Reason.NOT_A_NUMBER
            self.last = None
        else:
            assert self.do(Add(key, amount, self.id())) == Number(expected)

    @rule(key=KEYS, expected=VALUES, desired=VALUES)
    def compare_set(self, key, expected, desired):
        value = self.oracle.compare_set(key, expected, desired)
        assert self.do(CompareSet(key, expected, desired, self.id())) == Value(value)

    @rule(key=KEYS, value=VALUES)
    def append(self, key, value):
        self.oracle.append(key, value)
        assert self.do(Append(key, value, self.id())) == Done()

    @rule(key=KEYS)
    def delete(self, key):
        assert self.do(Delete(key, self.id())) == Flag(self.oracle.delete_key(key))

    @rule(keys=st.lists(KEYS, max_size=3))
    def check(self, keys):
        assert self.stores.ask(Check(tuple(keys))) == Flag(self.oracle.check(keys))

    @precondition(lambda self: self.last is not None)
    @rule()
    def send_it_again(self):
        change, answer = some(self.last)
        assert self.stores.ask(change) == answer

    @rule()
    def restart(self):
        self.stores.world.crash()

    @invariant()
    def they_hold_the_same(self):
        keys = sorted(self.oracle.list_keys())
        assert self.stores.ask(ListKeys()) == Keys(tuple(keys))
        assert self.stores.ask(NumKeys()) == Number(self.oracle.num_keys())
        values = tuple(self.oracle.multi_get(keys))
        assert self.stores.ask(Get(tuple(keys), 1.0)) == Values(values)
        size = sum(len(key.encode()) + len(value) for key, value in zip(keys, values, strict=True))
        assert self.stores.store.bytes == size


TestBesideHashStore = BesideHashStore.TestCase
TestBesideHashStore.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("value", [b"12abc", b" 12", b"1_2", b"0x1", b"9" * 30, "١".encode()])
def test_add_refuses_a_value_that_is_not_a_number(stores: Stores, value: bytes):
    stores.set(key=value)
    refusal = stores.refused(Add("key", 1))
    assert refusal.reason is Reason.NOT_A_NUMBER
    assert '"key"' in refusal.message
    assert stores.ask(Get(("key",), 1.0)) == Values((value,))


def test_add_stays_within_64_bits(stores: Stores):
    assert stores.ask(Add("n", 2**63 - 1)) == Number(2**63 - 1)
    assert f"would become {2**63}" in stores.refused(Add("n", 1)).message
    assert stores.ask(Add("n", -(2**63))) == Number(-1)
    assert stores.ask(Add("n", -(2**63) + 1)) == Number(-(2**63))
    assert stores.refused(Add("n", -1)).reason is Reason.NOT_A_NUMBER


def test_store_belongs_to_its_run(stores: Stores):
    stores.set(key=b"1")
    assert stores.ask(Check(("key",)), run="other") == Flag(False)
    assert stores.ask(NumKeys(), run="other") == Number(0)


# ---------------------------------------------------------------------- once


def test_change_that_is_sent_again_is_answered_and_not_carried_out(stores: Stores):
    add = Add("n", 5, OperationId("c", 1))
    assert [stores.ask(add) for _ in range(3)] == [Number(5)] * 3
    assert stores.ask(Add("n", 5)) == Number(10)
    assert stores.ask(add) == Number(5)


@pytest.mark.parametrize("crash", Crash)
def test_add_repeated_after_a_crash_counts_once(stores: Stores, crash: Crash):
    stores.ask(Add("n", 1, OperationId("c", 1)))
    stores.world.crash_next = crash
    add = Add("n", 1, OperationId("c", 2))
    stores.world.do(StoreRequest(stores.world.new_session(), RUN, add))
    assert stores.ask(add) == Number(2)
    assert stores.ask(Get(("n",), 1.0)) == Values((b"2",))


def test_store_change_and_its_answer_are_recorded_together(stores: Stores):
    stores.ask(Add("n", 5, OperationId("c", 1)))
    kinds = {type(record) for record in stores.world.last.records}
    assert kinds >= {StoreKeyRecord, StoreOperationRecord}


def test_compare_set_that_failed_is_not_tried_again_by_a_late_copy(stores: Stores):
    stores.set(key=b"theirs")
    late = CompareSet("key", b"mine", b"new", OperationId("c", 1))
    assert stores.ask(late) == Value(b"theirs")
    stores.set(key=b"mine")
    assert stores.ask(late) == Value(b"theirs")
    assert stores.ask(Get(("key",), 1.0)) == Values((b"mine",))


def test_older_change_is_refused_for_its_answer_is_gone(stores: Stores):
    for number in (1, 2):
        stores.ask(Add("n", 1, OperationId("c", number)))
    refusal = stores.refused(Add("n", 1, OperationId("c", 1)))
    assert refusal.reason is Reason.STALE_OPERATION
    assert refusal.metadata == {"last": "2"}
    assert stores.ask(Get(("n",), 1.0)) == Values((b"2",))


def test_number_that_stands_for_two_operations_is_refused(stores: Stores):
    stores.ask(Add("n", 1, OperationId("c", 1)))
    refusal = stores.refused(Delete("n", OperationId("c", 1)))
    assert (refusal.reason, refusal.metadata) == (Reason.INVALID_ARGUMENT, {"field": "operation.number"})


def test_refused_change_may_be_sent_again_when_it_can_be_carried_out(stores: Stores):
    stores.set(n=b"x")
    add = Add("n", 1, OperationId("c", 1))
    assert stores.refused(add).reason is Reason.NOT_A_NUMBER
    stores.set(n=b"1")
    assert stores.ask(add) == Number(2)


# ---------------------------------------------------------------------- waiting


def test_wait_ends_when_all_its_keys_are_there(stores: Stores):
    getter = stores.wait(Get(("a", "b", "a"), 10.0))
    waiter = stores.wait(Wait(("b", "c"), 10.0))
    assert stores.set(a=b"1") == []
    assert stores.set(b=b"2") == [(getter, Values((b"1", b"2", b"1")))]
    assert stores.set(c=b"") == [(waiter, Done())]
    assert stores.store.waiters == {}


@pytest.mark.parametrize("change", [Add("k", 1), Append("k", b""), CompareSet("k", b"", b"1")])
def test_every_change_that_makes_a_key_ends_a_wait_for_it(stores: Stores, change: Operation):
    waiter = stores.wait(Wait(("k",), 10.0))
    effects = stores.world.do(StoreRequest(stores.world.new_session(), RUN, change))
    assert ([waiter], Done()) in [(list(audience), message) for audience, message in effects.deliveries]


def test_key_that_was_removed_meanwhile_is_waited_for_again(stores: Stores):
    waiter = stores.wait(Wait(("a", "b"), 10.0))
    stores.set(a=b"1")
    stores.ask(Delete("a"))
    assert stores.set(b=b"1") == []
    assert stores.set(a=b"1") == [(waiter, Done())]


def test_set_wakes_for_all_of_its_keys_at_once(stores: Stores):
    waiter = stores.wait(Get(("b", "a"), 10.0))
    assert stores.set(a=b"1", b=b"2") == [(waiter, Values((b"2", b"1")))]


def test_nothing_to_wait_for_is_answered_at_once(stores: Stores):
    assert stores.ask(Wait((), 10.0)) == Done()
    assert stores.ask(Get((), 10.0)) == Values(())


def test_wait_ends_at_its_deadline_and_names_the_keys_that_are_missing(stores: Stores):
    stores.set(there=b"1")
    keys = ("there", "x\n", *(f"k{n}" for n in range(6)))
    stores.wait(Wait(keys, 5.0))
    stores.world.tick(at=stores.world.now + 4.9)
    assert stores.world.last.deliveries == []
    stores.world.tick(at=stores.world.now + 0.2)
    (((_,), refused),) = stores.world.last.deliveries
    assert isinstance(refused, Refused)
    assert refused.refusal.reason is Reason.STORE_TIMED_OUT
    assert (
        'Wait timeout after 5 s for keys of run job1 that nobody set: "x\\n", "k0", "k1", "k2" and 3 more'
        in (refused.refusal.message)
    )
    assert refused.refusal.metadata == {"missing": "7"}
    assert stores.store.waiters == {}
    assert stores.set(k0=b"1") == []


def test_each_wait_has_its_own_deadline(stores: Stores):
    late, early, never = (stores.wait(Wait(("k",), timeout)) for timeout in (20.0, 10.0, 0.0))
    stores.world.tick()
    assert [list(audience) for audience, _ in stores.world.last.deliveries] == [[early]]
    stores.world.wait(1_000_000.0)
    assert set(stores.store.waiters) == {never}
    assert late not in stores.store.waiters
    assert stores.set(k=b"1") == [(never, Done())]


def test_call_that_is_over_is_not_waited_for(stores: Stores):
    first, second = (stores.wait(Wait(("k",), 10.0)) for _ in range(2))
    stores.world.do(Disconnected(first))
    assert stores.set(k=b"1") == [(second, Done())]
    assert stores.store._watchers == {}
    stores.world.wait(20.0)
    assert first not in [session for audience, _ in stores.world.last.deliveries for session in audience]


def test_waits_that_were_answered_leave_nothing_behind(stores: Stores):
    """Also no alarms: their deadlines may be an hour away, and there may be thousands a second."""
    for number in range(1_000):
        stores.wait(Wait((f"k{number}",), 3600.0))
        stores.set(**{f"k{number}": b""})
        stores.ask(Delete(f"k{number}"))
    assert (stores.store.waiters, stores.store._watchers) == ({}, {})
    assert len(stores.world.coordinator._timers._heap) < 200


def test_write_looks_only_at_waiters_of_its_key(stores: Stores, monkeypatch):
    for number in range(200):
        stores.wait(Wait((f"other{number}", "k"), 100.0))
    waiter = stores.wait(Wait(("k",), 100.0))
    probed: list[int] = []
    find = stores.store._find_missing

    def looking(one: Waiter) -> str | None:
        probed.append(one.session)
        return find(one)

    monkeypatch.setattr(stores.store, "_find_missing", looking)
    assert stores.set(k=b"1") == [(waiter, Done())]
    assert probed == [waiter]


# ---------------------------------------------------------------------- restoring


def test_restart_loses_nothing_that_was_answered(stores: Stores):
    stores.set(a=b"1", b=b"2")
    stores.ask(Delete("a"))
    stores.ask(Add("n", 3, OperationId("c", 7)))
    stores.wait(Wait(("never",), 10.0))
    stores.world.crash()
    assert stores.ask(ListKeys()) == Keys(("b", "n"))
    assert stores.ask(Add("n", 3, OperationId("c", 7))) == Number(3)
    assert stores.refused(Add("n", 3, OperationId("c", 6))).reason is Reason.STALE_OPERATION
    assert stores.store.waiters == {}


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("operation", "field"),
    [
        (Add("n", 1, OperationId("", 1)), "operation.client"),
        (Add("n", 1, OperationId("a\0b", 1)), "operation.client"),
        (Add("n", 1, OperationId("c", 0)), "operation.number"),
        (Wait(("k",), 1e12), "timeout"),
        (Get(("k",), -1.0), "timeout"),
    ],
)
def test_invalid_store_operation_is_refused_and_creates_no_run(
    stores: Stores, operation: Operation, field: str
):
    refusal = stores.refused(operation)
    assert (refusal.reason, refusal.metadata) == (Reason.INVALID_ARGUMENT, {"field": field})
    assert stores.world.coordinator.runs == {}


def test_run_has_a_name_that_can_be_printed(stores: Stores):
    for name in ("", "a\nb", "j" * 10_000):
        assert stores.refused(NumKeys(), run=name).metadata == {"field": "run_id"}


def test_refused_change_begins_no_run(stores: Stores):
    assert stores.refused(Set((("k" * 5_000, b""),))).reason is Reason.LIMIT_EXCEEDED
    assert stores.world.coordinator.runs == {}


def test_run_that_began_with_its_store_takes_any_generation(stores: Stores):
    stores.set(k=b"1")
    client = stores.world.start(0, generation=3)
    assert client.session is not None
    assert stores.world.coordinator.runs[RUN].generation == 3
    assert stores.ask(NumKeys()) == Number(1)


# ---------------------------------------------------------------------- by prefix


def test_all_keys_that_begin_so_are_removed_for_good_and_no_other():
    stores = Stores()
    stores.ask(Set((("round.1/a", b"1"), ("round.1/b", b"2"), ("round.10/a", b"3"), ("x", b"4"))))
    assert stores.ask(DeletePrefix("round.1/")) == Number(2)
    assert stores.ask(DeletePrefix("round.1/")) == Number(0)
    stores.world.crash()
    assert stores.ask(ListKeys()) == Keys(("round.10/a", "x"))
    assert stores.world.coordinator.run(RUN).store.bytes == len("round.10/a3x4")


def test_all_keys_at_once_are_not_removed_by_mistake():
    stores = Stores()
    stores.ask(Set((("x", b"4"),)))
    assert stores.refused(DeletePrefix("")).reason is Reason.INVALID_ARGUMENT
    assert stores.ask(NumKeys()) == Number(1)
