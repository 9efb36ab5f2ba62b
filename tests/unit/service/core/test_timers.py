from muster.service.core.timers import Timers


def test_nothing_is_due_when_nothing_is_armed():
    timers = Timers[str]()
    assert timers.next_time() is None
    assert timers.pop_due(1e9) == []


def test_items_come_out_earliest_first_and_only_when_due():
    timers = Timers[str]()
    timers.arm("late", 3.0)
    timers.arm("early", 1.0)
    timers.arm("later", 5.0)
    assert timers.next_time() == 1.0
    assert timers.pop_due(3.0) == ["early", "late"]
    assert timers.next_time() == 5.0


def test_item_is_woken_once_at_the_earliest_of_its_times():
    timers = Timers[str]()
    timers.arm("a", 5.0)
    timers.arm("a", 2.0)
    timers.arm("a", 4.0)
    assert timers.pop_due(2.0) == ["a"]
    assert timers.pop_due(10.0) == []
    assert timers.next_time() is None


def test_item_can_be_armed_again_once_it_was_woken():
    timers = Timers[str]()
    timers.arm("a", 1.0)
    assert timers.pop_due(1.0) == ["a"]
    timers.arm("a", 7.0)
    assert timers.pop_due(6.9) == []
    assert timers.pop_due(7.0) == ["a"]


def test_items_due_at_the_same_time_need_not_be_comparable():
    timers = Timers[object]()
    first, second = object(), object()
    timers.arm(first, 1.0)
    timers.arm(second, 1.0)
    assert timers.pop_due(1.0) == [first, second]


def test_item_that_is_disarmed_is_not_woken():
    timers = Timers[str]()
    timers.arm("a", 1.0)
    timers.arm("b", 2.0)
    timers.disarm("a")
    timers.disarm("never armed")
    assert timers.pop_due(3.0) == ["b"]


def test_item_can_be_armed_again_after_it_was_disarmed():
    timers = Timers[str]()
    timers.arm("a", 1.0)
    timers.disarm("a")
    timers.arm("a", 2.0)
    assert timers.pop_due(1.0) == []
    assert timers.pop_due(2.0) == ["a"]


def test_disarmed_items_do_not_pile_up_and_order_is_kept():
    timers = Timers[int]()
    timers.arm(-1, 500.0)
    timers.arm(-2, 400.0)
    for item in range(10_000):
        timers.arm(item, 1_000.0 + item)
        timers.disarm(item)
    assert len(timers._heap) < 100
    assert timers.pop_due(1e9) == [-2, -1]


def test_at_most_so_many_come_out_at_once_and_the_others_stay_due():
    timers = Timers[str]()
    for at, item in enumerate("abc"):
        timers.arm(item, float(at))
    assert timers.pop_due(9.0, 2) == ["a", "b"]
    assert timers.next_time() == 2.0
    assert timers.pop_due(9.0, 2) == ["c"]


def test_item_armed_for_infinity_is_never_woken():
    timers = Timers[str]()
    timers.arm("a", float("inf"))
    assert timers.next_time() is None
