"""The scenarios of the core: each file's output is what the core does. See scenarios/README.md."""

import difflib
import os
from pathlib import Path

import pytest

from tests.support.world.scenarios import play

SCENARIOS = Path(__file__).parent / "scenarios"
FILES = sorted(SCENARIOS.rglob("*.txt"))
REWRITE = "REWRITE_SCENARIOS"


@pytest.mark.parametrize("path", FILES, ids=[str(f.relative_to(SCENARIOS).with_suffix("")) for f in FILES])
def test_scenario(path: Path):
    expected = path.read_text()
    actual = play(expected)
    if os.environ.get(REWRITE):
        path.write_text(actual)
        return
    if actual != expected:
        lines = expected.splitlines(), actual.splitlines()
        diff = "\n".join(difflib.unified_diff(*lines, "expected", "actual", n=6, lineterm=""))
        hint = "If the core is right, see scenarios/README.md."
        pytest.fail(f"{path.relative_to(SCENARIOS)}\n{diff}\n{hint}", pytrace=False)


def test_output_of_a_command_is_replaced_and_the_rest_stays():
    before = "# Why.\n\n== One rank\n> joined 0 size=1\n> show-group\n"
    after = "\n# The end.\n"
    assert play(f"{before}  next #7\n{after}") == f"{before}  next #0; decisions kept: none\n{after}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param("== A\n> jump 0\n", "line 2: > jump 0\nunknown command: jump", id="unknown command"),
        pytest.param("== A\n> join 0 colour=red\n", "unknown: colour", id="unknown option"),
        pytest.param("== A\n> crash 0\n", "unknown: 0", id="name for a command without names"),
        pytest.param("== A\n> connect 0\n", "0 has not started", id="process that has not started"),
        pytest.param("== A\n> wait 3\n", "not a time, such as 2.5s: 3", id="time without a unit"),
        pytest.param("== A\n> joined 0\n\n  0: joined\n", "belongs to no command", id="trailing output"),
        pytest.param("== A\n  0: joined\n", "belongs to no command", id="output before a command"),
        pytest.param("> crash\n", "before the first '=='", id="command before a scenario"),
        pytest.param("== A\narrive 0\n", "neither a heading", id="line of no kind"),
        pytest.param("== A\n> joined 2 size=2\n", "write join: 2: refused", id="setting that is refused"),
        pytest.param("# Nothing.\n", "no scenario", id="empty file"),
    ],
)
def test_line_that_is_no_scenario_is_named(text: str, problem: str):
    with pytest.raises(AssertionError) as error:
        play(text)
    assert problem in str(error.value)
