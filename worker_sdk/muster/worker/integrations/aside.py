"""A checkpoint of any name: written beside it, and renamed once when all ranks have written."""

import json
import logging
import os
import re
import shutil
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from muster.worker.saves.directory import MARKER, UncommittedError, sync, write_marker

logger = logging.getLogger(__name__)

REPLACED = ".replaced"
"""How the name ends of a checkpoint while another takes its place."""
REMOVED = ".removed-"
"""How the name begins of what is being removed."""


@dataclass(frozen=True, slots=True)
class Marker:
    """What stands in a checkpoint, and says that it is one."""

    run_id: str
    generation: int
    world_size: int
    prefix: str
    sequence: int
    """Of the decision that committed it."""


class Aside:
    """One save of a checkpoint, on the rank that commits it.

    Args:
        path: the checkpoint's name.
        generation: the job's life between restarts.
        number: of the save in it.
    """

    def __init__(self, path: Path, generation: int, number: int) -> None:
        self.path = path
        self.unfinished = path.with_name(f".{path.name}.{generation}-{number}")
        """Where it is written."""

    def begin(self) -> None:
        """Make the folder that is written to, and remove what saves of this name have left."""
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        _restore(self.path)
        unfinished = re.compile(rf"\.{re.escape(self.path.name)}\.\d+-\d+")
        for left in folder.iterdir():
            if left.name.startswith(REMOVED):
                shutil.rmtree(left, ignore_errors=True)
            elif unfinished.fullmatch(left.name):
                _remove(left)
        self.unfinished.mkdir()

    def give_up(self) -> None:
        """Remove what was written, unless it was committed."""
        _remove(self.unfinished)

    def commit(self, marker: Marker) -> None:
        """When all have written: make it the checkpoint, on the disk and for good.

        One of the same name is replaced. At each moment there is the old one or the new one, and
        :func:`committed` finds it.

        Raises:
            OSError: it could not be done, or another life of the job has removed what was written.
        """
        write_marker(self.unfinished, asdict(marker))
        if _is_committed(self.path):
            _remove(_replaced(self.path))
            self.path.rename(_replaced(self.path))
        else:
            _remove(self.path)
        try:
            self.unfinished.rename(self.path)
        except OSError:
            _restore(self.path)
            raise
        try:
            sync(self.path.parent)
        except OSError as error:
            # It has its name, so that nobody may say that it was not committed.
            logger.warning("%s has its name, and may lose it if this machine fails now: %s", self.path, error)
            return
        _remove(_replaced(self.path))


def read(path: Path) -> tuple[Path, Marker]:
    """What a checkpoint is, and where.

    Args:
        path: its name.

    Returns:
        The same path, unless the process that replaced it ended half-way; and the marker.

    Raises:
        UncommittedError: it is none.
    """
    try:
        return path, _marker(path)
    except (OSError, ValueError, TypeError) as error:
        with suppress(OSError, ValueError, TypeError):
            return _replaced(path), _marker(_replaced(path))
        raise UncommittedError(
            f"{path} is not a committed checkpoint: {error}. A save that was not finished, or that another "
            "program wrote, is not loaded."
        ) from error


def latest(folder: str | Path) -> Path | None:
    """The checkpoint in a folder that was committed last; what is not committed is passed over.

    Args:
        folder: where checkpoints have their names.
    """
    found: dict[Path, float] = {}
    for marker in Path(folder).glob(f"*/{MARKER}"):
        path = marker.parent
        if path.name.endswith(REPLACED):
            path = path.with_name(path.name.removeprefix(".").removesuffix(REPLACED))
        if not path.name.startswith("."):
            with suppress(UncommittedError, OSError):
                found[path] = (read(path)[0] / MARKER).stat().st_mtime
    return max(found, key=lambda path: found[path]) if found else None


def _marker(path: Path) -> Marker:
    return Marker(**json.loads((path / MARKER).read_text()))


def _is_committed(path: Path) -> bool:
    with suppress(OSError, ValueError, TypeError):
        return bool(_marker(path))
    return False


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}{REPLACED}")


def _restore(path: Path) -> None:
    """End a replacement that was left half-way."""
    if _is_committed(path):
        _remove(_replaced(path))
    elif _is_committed(_replaced(path)) and not os.path.lexists(path):
        _replaced(path).rename(path)


def _remove(path: Path) -> None:
    # Renamed first: half of a checkpoint must not look like one, and who still writes it must not commit it.
    if os.path.lexists(path):
        doomed = path.with_name(f"{REMOVED}{uuid.uuid4().hex}")
        path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)
