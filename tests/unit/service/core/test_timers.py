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


def test_an_item_is_woken_once_at_the_earliest_of_its_times():
    timers = Timers[str]()
    timers.arm("a", 5.0)
    timers.arm("a", 2.0)
    timers.arm("a", 4.0)
    assert timers.pop_due(2.0) == ["a"]
    assert timers.pop_due(10.0) == []
    assert timers.next_time() is None


def test_an_item_can_be_armed_again_once_it_was_woken():
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
