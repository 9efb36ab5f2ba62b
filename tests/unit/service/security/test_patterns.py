"""The patterns of a token's runs."""

import pytest

from muster.service.security.patterns import matches


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
def test_a_pattern_is_a_glob_of_the_whole_id(run_id: str, patterns: list[str], matched: bool):
    assert matches(run_id, patterns) is matched
