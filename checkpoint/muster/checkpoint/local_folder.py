"""The names of what a keeper and the ranks of its node share in a run's local folder."""

import re
from pathlib import Path

from muster.checkpoint.committed import SaveAttempt, run_mark

PREFIX = "muster-"
"""Begins the name of a run's folder in the user's local folder."""
ADDRESS = "keeper.json"
"""The file in which a keeper says where its node's ranks reach it."""
LOCK = "keeper.lock"
"""The file that a living keeper has locked."""
REQUEST = "keeper.run"
"""The file in which a rank writes the id of its run, for ``muster keep --runs``."""
NOTES = ".notes"
"""In an attempt's folder: the folder of the notes that this node's ranks leave for other ranks."""

_ATTEMPT = re.compile(r"(0|[1-9]\d{0,19})-(0|[1-9]\d{0,19})", re.ASCII)


def run_folder(local: Path, run_id: str) -> Path:
    """Return the folder of a run.

    Args:
        local: the user's local folder.
        run_id: the training job.
    """
    return local / f"{PREFIX}{run_mark(run_id)}"


def attempt_name(attempt: SaveAttempt) -> str:
    """Return the name of an attempt in folders and requests."""
    return f"{attempt.generation}-{attempt.number}"


def find_attempt(name: str) -> SaveAttempt | None:
    """Return the attempt with this name; None if no attempt has it."""
    found = _ATTEMPT.fullmatch(name)
    return None if found is None else SaveAttempt(int(found[1]), int(found[2]))


def parse_attempt(name: str) -> SaveAttempt:
    """Return the attempt with this name.

    Raises:
        ValueError: no attempt has it.
    """
    attempt = find_attempt(name)
    if attempt is None:
        raise ValueError(f"{name!r} names no attempt, such as 0-12: its generation and its number")
    return attempt
