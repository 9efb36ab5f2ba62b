"""Cleaning up after interrupted saves: names are restored, commits finished, remains removed."""

import logging
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

from muster.checkpoint.manifest import MANIFEST, Manifest, ManifestError
from muster.checkpoint.retry import ABSENT_FILE, is_file, is_folder, is_link, lexists, retrying
from muster.checkpoint.source import beside
from muster.checkpoint.version import LaterVersionError
from muster.worker.integrations.commit.lookup import (
    REPLACED,
    _marker,
    entries,
    given_name,
    is_committed,
    replaced_name,
)

logger = logging.getLogger(__name__)
REMOVED = ".removed-"
"""How the name begins of what is being removed."""
_UNFINISHED = re.compile(r"\..+\.\d+-\d+-[0-9a-f]{8}")
"""The name of what is not committed."""


def restore(folder: Path) -> list[Path]:
    """Restore checkpoints left mid-replacement by a crash.

    Args:
        folder: where checkpoints have their names.

    Returns:
        Those that have them back.
    """
    names = [
        given_name(left)
        for left in entries(folder)
        if left.name.startswith(".") and not left.name.startswith("..") and left.name.endswith(REPLACED)
    ]
    without = [path for path in names if not lexists(path)]
    for path in without:
        restore_name(path)
    return [path for path in without if lexists(path)]


def sweep(folder: Path, alias: str | None = None, but: Path | None = None) -> None:
    """Remove what failed saves have left, and checkpoints that are being removed.

    Args:
        folder: where checkpoints have their names.
        alias: of the saves, as in :class:`StagedCheckpoint`; default: any.
        but: what is being written now.
    """
    unfinished = re.compile(rf"\.{'.+' if alias is None else re.escape(alias)}\.\d+-\d+(-[0-9a-f]{{8}})?")
    for left in entries(folder):
        if left.name.startswith(REMOVED):
            destroy(left)
        elif not unfinished.fullmatch(left.name) or (but is not None and left in (but, *but.parents)):
            continue
        elif not _finished_or_unreadable(left):
            remove(left)


def finish(path: Path) -> None:
    """Finish the commit or replacement of a file that a crash interrupted: put its description beside it.

    Args:
        path: the checkpoint.

    Raises:
        OSError: that cannot be done.
    """
    if not is_file(path) or lexists(beside(path)):
        return
    for left in entries(path.parent):
        if _UNFINISHED.fullmatch(left.name):
            _finished_or_unreadable(left)
    if not lexists(beside(path)) and lexists(replaced_name(beside(path))):
        # The file has not been replaced.
        replaced_name(beside(path)).rename(beside(path))


def remove(path: Path) -> None:
    """Remove a checkpoint, or what may have become one.

    Args:
        path: of a folder, a file or a link; it need not be there.

    Raises:
        OSError: it cannot be looked at, or not be renamed.
    """
    if is_file(path) and lexists(beside(path)):
        destroy(retire(beside(path)))
    if lexists(path):
        destroy(retire(path))


def retire(path: Path) -> Path:
    """Take a checkpoint's name away, before it is removed.

    Half of a checkpoint must not look like one, and a process that still writes it must not commit it.

    Returns:
        Where it is to be removed; the next sweep of the folder removes it, too.
    """
    doomed = doomed_name(path)
    path.rename(doomed)
    return doomed


def doomed_name(path: Path) -> Path:
    """Return a name under which a checkpoint can be removed."""
    return path.with_name(f"{REMOVED}{uuid.uuid4().hex}")


def _finished_or_unreadable(left: Path) -> bool:
    """Finish the commit of a file, or leave an unreadable folder as it is: it may describe a checkpoint."""
    try:
        return _finish_commit(left)
    except (OSError, LaterVersionError) as error:
        logger.warning("%s is left as it is: %s", left, error)
        return True


def _finish_commit(left: Path) -> bool:
    """Put beside a file what describes it, if its commit was left after the rename that gave it its name.

    Args:
        left: the folder in which it was written.

    Returns:
        Whether it was so.
    """
    try:
        _marker(left)
        files = list(Manifest.decode(retrying(str(left), (left / MANIFEST).read_bytes)).files)
    except (*ABSENT_FILE, ManifestError, ValueError, TypeError):
        return False
    path = left.with_name(files[0]) if len(files) == 1 and "/" not in files[0] else left
    if not is_file(path) or lexists(left / path.name) or lexists(beside(path)):
        return False
    left.rename(beside(path))
    return True


def restore_name(path: Path) -> None:
    """End a replacement that was left half-way."""
    if is_committed(path):
        remove(replaced_name(path))
    elif is_committed(replaced_name(path)) and not lexists(path):
        replaced_name(path).rename(path)


def is_real_folder(path: Path) -> bool:
    """Return whether a path is a folder, and no link to one.

    Raises:
        OSError: it cannot be looked at.
    """
    return is_folder(path) and not is_link(path)


def destroy(path: Path) -> None:
    """Remove what is no checkpoint any more, as far as that can be done."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
