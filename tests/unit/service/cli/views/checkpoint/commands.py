"""Run ``muster checkpoint``, and read its tables."""

import re
from typing import Any

from muster.service.cli.failure import Exit
from tests.unit.service.cli.test_main import invoke

NOW = 1_700_000_041.0
FILE = "__1_0.distcp"


def run(verb: str, *arguments: Any, code: int = Exit.DONE) -> Any:
    result = invoke("checkpoint", verb, *map(str, arguments))
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    return result


def columns(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line) for line in text.splitlines()]
