"""The patterns of a token's runs."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.service.security.patterns import matches, overlap, overlapping


@pytest.mark.parametrize(
    ("run_id", "patterns", "matched"),
    [
        ("team-a-1", ["team-a-*"], True),
        ("team-a-", ["team-a-*"], True),
        ("team-ab", ["team-a-*"], False),
        ("team-b-1", ["team-a-*", "team-b-?"], True),
        ("team-b-10", ["team-b-?"], False),
        ("Team-a-1", ["team-a-*"], False),
        ("x-b", ["x-[a-c]"], True),
        ("x-d", ["x-[a-c]"], False),
        ("x-d", ["x-[!a-c]"], True),
        ("a/b\nc", ["*"], True),
        ("anything", [], False),
    ],
)
def test_pattern_is_a_glob_of_the_whole_id(run_id: str, patterns: list[str], matched: bool):
    assert matches(run_id, patterns) is matched


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("team-a-*", "team-a-b-*", True),
        ("team-a-*", "team-a-b", True),
        ("team-a.*", "team-a-b.*", False),
        ("team-a.*", "team-b.*", False),
        ("*-prod", "team-a-*", True),
        ("*-prod", "team-a-dev", False),
        ("run-?", "run-10", False),
        ("run-??", "run-*0", True),
        ("a*b*c", "*d*", True),
        ("a", "a", True),
        ("", "*", True),
        ("x-[ab]", "x-a", True),
        ("*" * 2_000 + "a", "*" * 2 + "b", False),
    ],
)
def test_patterns_overlap_if_a_run_may_match_both(one: str, other: str, expected: bool):
    assert (overlap(one, other), overlap(other, one)) == (expected, expected)


PATTERNS = st.text("ab*?", max_size=6)


@given(PATTERNS, PATTERNS, st.text("ab", max_size=6))
def test_patterns_that_match_one_run_overlap(one: str, other: str, run_id: str):
    if fnmatchcase(run_id, one) and fnmatchcase(run_id, other):
        assert overlap(one, other)


def test_overlapping_names_holders_with_accidentally_overlapping_patterns():
    holders = [
        ("team-a", ["team-a-*", "shared-*"]),
        ("team-a-b", ["team-a-b-*", "shared-*"]),
        ("team-c", ["team-c.*"]),
        ("old team-c", ["team-c.*"]),
        ("all", ["*"]),
    ]
    assert list(overlapping(holders)) == [("team-a", "team-a-*", "team-a-b", "team-a-b-*")]
