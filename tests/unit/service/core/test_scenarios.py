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
        pytest.fail(
            f"{path.relative_to(SCENARIOS)}\n{diff}\nIf this is right: see scenarios/README.md.",
            pytrace=False,
        )
