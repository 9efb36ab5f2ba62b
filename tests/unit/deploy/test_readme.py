"""The table in the chart's README is that of its values."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "dev/chart-readme.py"

table = runpy.run_path(str(SCRIPT))["table"]


def test_the_table_is_up_to_date():
    done = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_sections_and_rows():
    values = """\
# About a.
a:
  # One: x|y.
  b: 1
  # A map,
  # in two lines.
  c: {d: null}
# As a whole.
e:
  f: [g]
"""
    assert table(values).splitlines()[2:] == [
        "| **`a`** |  | About a. |",
        "| `a.b` | `1` | One: x\\|y. |",
        '| `a.c` | `{"d": null}` | A map, in two lines. |',
        '| `e` | `{"f": ["g"]}` | As a whole. |',
    ]


def test_a_key_without_a_comment_is_refused():
    with pytest.raises(ValueError, match=r"a\.c in values.yaml has no comment"):
        table("a:\n  # One.\n  b: 1\n  c: 2\n")
