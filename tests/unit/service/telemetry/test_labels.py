"""Invariant 15 (every bound is a named limit): label values are bounded, whatever users call their runs."""

from hypothesis import given
from hypothesis import strategies as st

from muster.service.telemetry.labels import OVERFLOW, PrefixLabels, RunLabels


class Runs:
    """Labels of runs, and the names that have ended."""

    def __init__(self, most: int) -> None:
        self.ended: list[str] = []
        self.labels = RunLabels(most, self.ended.append)


# ---------------------------------------------------------------------- prefixes


def test_a_number_in_a_prefix_makes_no_new_value():
    label = PrefixLabels(3)
    assert {label(f"step-{step}") for step in range(12_000, 13_000)} == {"step-N"}
    assert label("epoch-3/step-12000") == "epoch-N/step-N"
    assert label("checkpoint") == "checkpoint"


def test_past_the_bound_all_prefixes_are_other_and_what_is_known_stays():
    label = PrefixLabels(2)
    assert [label(name) for name in "abcab"] == ["a", "b", OVERFLOW, "a", "b"]


def test_some_prefixes_are_always_let_through_and_take_no_place():
    label = PrefixLabels(2, always=("save", "save/commit"))
    assert [label(name) for name in ("save", "a", "b", "c", "save/commit")] == [
        "save",
        "a",
        "b",
        OVERFLOW,
        "save/commit",
    ]


@given(st.lists(st.text(max_size=5)), st.integers(1, 5))
def test_there_are_never_more_prefixes_than_the_bound_and_other(names: list[str], most: int):
    label = PrefixLabels(most)
    first = [label(name) for name in names]
    assert len(set(first) - {OVERFLOW}) <= most
    # A prefix that was given a value of its own keeps it; nothing moves out of "other" either.
    assert [label(name) for name in names] == first


# ---------------------------------------------------------------------- runs


def test_a_run_is_called_by_its_name():
    assert Runs(3).labels.used("job-1") == "job-1"


def test_past_the_bound_all_runs_that_are_in_use_are_other_and_what_is_known_stays():
    runs = Runs(2)
    assert [runs.labels.used(name) for name in "abcab"] == ["a", "b", OVERFLOW, "a", "b"]
    assert runs.labels.of_all(dict.fromkeys("cab")) == {"a": "a", "b": "b", "c": OVERFLOW}
    assert runs.ended == []


def test_a_run_keeps_its_name_when_it_goes_out_of_use():
    runs = Runs(2)
    assert runs.labels.of_all({"a": None, "b": None}) == {"a": "a", "b": "b"}
    assert runs.labels.of_all({"a": 5.0, "b": None}) == {"a": "a", "b": "b"}
    assert runs.ended == []


def test_a_run_that_is_in_use_takes_the_place_of_the_one_that_has_been_out_of_use_for_longest():
    runs = Runs(3)
    runs.labels.of_all({"a": 7.0, "b": 5.0, "c": 6.0})
    assert runs.labels.used("d") == "d"
    assert runs.ended == ["b"]
    assert runs.labels.of_all({"a": 7.0, "b": 5.0, "c": 6.0, "d": None, "e": None}) == {
        "a": "a",
        "d": "d",
        "e": "e",
    }
    assert runs.ended == ["b", "c"]


def test_a_run_that_is_in_use_comes_before_those_that_are_not_wherever_it_stands():
    assert Runs(1).labels.of_all({"a": 5.0, "b": None}) == {"b": "b"}


def test_a_run_that_went_out_of_use_gives_its_place_at_the_same_look():
    runs = Runs(1)
    assert runs.labels.used("a") == "a"
    assert runs.labels.of_all({"b": None, "a": 5.0}) == {"b": "b"}
    assert runs.ended == ["a"]


def test_a_run_that_comes_back_into_use_keeps_its_place():
    runs = Runs(2)
    runs.labels.of_all({"a": 5.0, "b": 6.0})
    runs.labels.used("a")
    assert [runs.labels.used(name) for name in "cd"] == ["c", OVERFLOW]
    assert runs.ended == ["b"]


def test_a_run_that_is_out_of_use_has_a_name_while_there_is_room_and_never_takes_one():
    runs = Runs(2)
    assert runs.labels.of_all({"a": 5.0, "b": 6.0, "c": 7.0}) == {"a": "a", "b": "b"}
    runs.labels.forget("a")
    assert runs.labels.of_all({"b": 6.0, "c": 7.0}) == {"b": "b", "c": "c"}
    assert runs.ended == ["a"]


def test_a_place_is_free_again_when_its_run_is_forgotten():
    runs = Runs(1)
    runs.labels.used("a")
    runs.labels.forget("b")
    assert runs.labels.used("b") == OVERFLOW
    runs.labels.forget("a")
    assert runs.labels.used("b") == "b"
    assert runs.ended == ["a"]


def test_a_run_that_is_called_other_takes_no_place():
    runs = Runs(1)
    assert runs.labels.used(OVERFLOW) == OVERFLOW
    assert runs.labels.of_all({OVERFLOW: 5.0}) == {}
    assert runs.labels.of_all({OVERFLOW: None, "a": None}) == {OVERFLOW: OVERFLOW, "a": "a"}
    runs.labels.forget(OVERFLOW)
    assert runs.ended == []


looks = st.dictionaries(st.sampled_from("abcdefgh"), st.none() | st.floats(0, 10))


@given(st.lists(looks), st.integers(1, 5))
def test_names_are_of_those_in_use_and_never_more_than_the_bound(
    seen: list[dict[str, float | None]], most: int
):
    runs = Runs(most)
    named: set[str] = set()
    for look in seen:
        labels = runs.labels.of_all(look)
        names = {label for label in labels.values() if label != OVERFLOW}
        ended = runs.ended[:]
        runs.ended.clear()
        named = (named - set(ended)) | names
        assert len(named) <= most
        in_use = {run for run, since in look.items() if since is None}
        assert in_use <= set(labels)
        assert all(labels[run] == run for run in labels.keys() - in_use)
        if OVERFLOW in labels.values():
            assert not names - in_use, "nobody out of use has a name while one in use has none"
