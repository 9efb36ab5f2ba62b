"""Bytes are counted by owner, and an owner leaves room for others."""

from collections import Counter

from muster.serving.budget import ByteBudget
from muster.serving.counted import counted


def test_owner_leaves_room_for_others():
    budget = ByteBudget(most=100, most_of_one=60)
    with budget.hold(50, "10.0.0.7"):
        assert budget.held("10.0.0.7") == 50
        assert [budget.has_room(size, "10.0.0.7") for size in (10, 11)] == [True, False]
        assert budget.has_room(50, "10.0.0.8")
    assert budget.held("10.0.0.7") == 0


def test_owners_together_keep_the_bound():
    budget = ByteBudget(most=100, most_of_one=60)
    with budget.hold(55, "a"), budget.hold(41, "b"):
        assert [budget.has_room(size, "b") for size in (4, 5)] == [True, False]


def test_first_message_of_an_owner_may_have_any_size():
    budget = ByteBudget(most=100, most_of_one=60)
    with budget.hold(100, "a"):
        assert budget.has_room(1_000, "b")


def test_owner_without_bytes_is_removed():
    counter: Counter[str] = Counter()
    with counted(counter, "a"), counted(counter, "a", 3), counted(counter, "b"):
        assert counter == {"a": 4, "b": 1}
    assert not counter
    try:
        with counted(counter, "a"):
            raise KeyError
    except KeyError:
        assert not counter
