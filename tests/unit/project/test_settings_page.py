"""docs/settings.md has every variable and setting of the sources, and no other."""

import re
from pathlib import Path

from dev.docs.settings import COMMANDS, PAGE, filled, options, variables

ROOT = Path(__file__).resolve().parents[3]
VARIABLE = re.compile(r"\bMUSTER_[A-Z0-9]+(?:_[A-Z0-9]+)*\b(?!_)")
SOURCES = ("service", "relay", "watcher", "keeper", "preload", "client", "checkpoint", "worker_sdk", "deploy")
OF_OPTIONS = {name for one in COMMANDS for option in options(one) for name in variables(one, option)}


def _in_sources() -> set[str]:
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [path.read_text() for path in files if path.suffix in {".py", ".yaml", ".tpl", ".txt"}]
    return {name for text in texts for name in VARIABLE.findall(text)} - set(COMMANDS.values())


def test_page_has_every_variable_of_the_sources_and_no_other():
    assert set(VARIABLE.findall(PAGE.read_text())) - set(COMMANDS.values()) == _in_sources() | OF_OPTIONS


def test_tables_of_settings_follow_from_the_options():
    page = PAGE.read_text()
    assert filled(page) == page, "Run: python -m dev.docs.settings"
