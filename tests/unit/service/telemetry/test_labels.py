"""Rule 15: label values are bounded, whatever users call their runs and prefixes."""

from hypothesis import given
from hypothesis import strategies as st

from muster.service.telemetry.labels import OVERFLOW, BoundedLabel


def test_a_name_is_its_own_label():
    assert BoundedLabel(3)("job-1") == "job-1"


def test_a_number_in_a_prefix_makes_no_new_value():
    label = BoundedLabel(3, fold_digits=True)
    assert {label(f"step-{step}") for step in range(12_000, 13_000)} == {"step-N"}
    assert label("epoch-3/step-12000") == "epoch-N/step-N"
    assert label("checkpoint") == "checkpoint"


def test_past_the_bound_all_is_other_and_what_is_known_stays():
    label = BoundedLabel(2)
    assert [label(name) for name in "abcab"] == ["a", "b", OVERFLOW, "a", "b"]


@given(st.lists(st.text(max_size=5)), st.integers(1, 5), st.booleans())
def test_there_are_never_more_values_than_the_bound_and_other(names: list[str], most: int, fold: bool):
    label = BoundedLabel(most, fold_digits=fold)
    first = [label(name) for name in names]
    assert len(set(first) - {OVERFLOW}) <= most
    # A name that was given a value of its own keeps it; nothing moves out of "other" either.
    assert [label(name) for name in names] == first
