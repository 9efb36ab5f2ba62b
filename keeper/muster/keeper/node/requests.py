"""The runs whose ranks ask for a keeper on this node, as files in the local folder."""

import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from muster.checkpoint.local_folder import PREFIX, REQUEST, run_folder

logger = logging.getLogger(__name__)

MAX_RUN_ID = 4_096
"""Bytes of a request that are read."""
REMOVED = ".removed-"
"""The prefix of a folder that is being deleted."""


def requested_runs(local: Path, patterns: Sequence[str]) -> list[str]:
    """Return the runs whose ranks ask for a keeper.

    Args:
        local: the local folder, which ranks share with this process.
        patterns: glob patterns; runs that match none are left out.

    Raises:
        OSError: the folder cannot be read.
    """
    found = []
    for path in sorted(local.glob(f"{PREFIX}*/{REQUEST}")):
        run_id = _run_in(path)
        # Any process that can write the folder may write a request. A keeper goes only into its run's folder.
        is_its_own = run_id and run_folder(local, run_id) == path.parent
        if is_its_own and any(fnmatchcase(run_id, pattern) for pattern in patterns):
            found.append(run_id)
    return found


def was_requested(local: Path, run_id: str, seconds: float) -> bool:
    """Return whether a rank has asked for a run's keeper within the last seconds."""
    try:
        modified = (run_folder(local, run_id) / REQUEST).stat().st_mtime
    except FileNotFoundError:
        return False
    return time.time() - modified < seconds


def remove_run(local: Path, run_id: str) -> None:
    """Delete the folder of a run that no keeper keeps.

    Raises:
        OSError: it cannot be deleted.
    """
    folder = run_folder(local, run_id)
    doomed = local / f"{REMOVED}{folder.name}"
    shutil.rmtree(doomed, ignore_errors=True)
    with suppress(FileNotFoundError):
        # Renamed first: a rank that comes now makes a new folder.
        folder.rename(doomed)
    shutil.rmtree(doomed)


def sweep(local: Path) -> None:
    """Finish deletions that an earlier process has begun."""
    for path in local.glob(f"{REMOVED}{PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def _run_in(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_RUN_ID).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        logger.warning("%s is not read: %s", path, error)
        return ""
