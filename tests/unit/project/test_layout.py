"""A newcomer can read each folder and each module: neither is too long."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
MAX_MODULES = 20
"""In one folder, its ``__init__`` included and its packages not."""
MAX_LINES = 500
"""In one module."""

(SOURCES,) = re.findall(r"^SOURCES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
MODULES = [module for source in SOURCES.split() for module in sorted((ROOT / source).rglob("*.py"))]


def test_folders_have_at_most_20_modules():
    counts = Counter(module.parent.relative_to(ROOT).as_posix() for module in MODULES)
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_modules_have_at_most_500_lines():
    lines = {module.relative_to(ROOT).as_posix(): len(module.read_text().splitlines()) for module in MODULES}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}
