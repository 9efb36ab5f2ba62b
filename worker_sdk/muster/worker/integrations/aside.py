"""A checkpoint of any name: written beside it, and renamed once when all ranks have written."""

import json
import os
import re
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from muster.worker.saves.directory import MARKER, UncommittedError, sync


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
    """One save of a checkpoint.

    Args:
        path: the checkpoint's name.
        generation: the job's life between restarts.
        number: of the save in it. All ranks must name the same.
    """

    def __init__(self, path: Path, generation: int, number: int) -> None:
        self.path = path
        self.unfinished = path.with_name(f".{path.name}.{generation}-{number}")
        """Where it is written."""

    def begin(self) -> None:
        """On one rank, before it writes: remove what saves of this name have left that were not committed."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _restore(self.path)
        unfinished = re.compile(rf"\.{re.escape(self.path.name)}\.\d+-\d+")
        for left in self.path.parent.iterdir():
            if unfinished.fullmatch(left.name) and left != self.unfinished:
                shutil.rmtree(left, ignore_errors=True)

    def commit(self, marker: Marker) -> None:
        """On one rank, when all have written: make it the checkpoint, on the disk and for good.

        One of the same name is replaced. At each moment there is the old one or the new one, and
        :func:`committed` finds it.
        """
        with (self.unfinished / MARKER).open("w") as file:
            json.dump(asdict(marker), file)
            file.flush()
            os.fsync(file.fileno())
        sync(self.unfinished)
        if os.path.lexists(self.path):
            self.path.rename(_replaced(self.path))
        self.unfinished.rename(self.path)
        sync(self.path.parent)
        shutil.rmtree(_replaced(self.path), ignore_errors=True)


def committed(path: Path) -> Path:
    """Where a checkpoint is.

    Args:
        path: its name.

    Returns:
        The same, unless the process that replaced it ended half-way.

    Raises:
        UncommittedError: it is none.
    """
    found = path if os.path.lexists(path) else _replaced(path)
    try:
        Marker(**json.loads((found / MARKER).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UncommittedError(
            f"{path} is not a committed checkpoint: {error}. A save that was not finished, or that another "
            "program wrote, is not loaded."
        ) from error
    return found


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
                found[path] = (committed(path) / MARKER).stat().st_mtime
    return max(found, key=lambda path: found[path]) if found else None


REPLACED = ".replaced"
"""How the name ends of a checkpoint while another takes its place."""


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}{REPLACED}")


def _restore(path: Path) -> None:
    """End a replacement that was left half-way."""
    if _replaced(path).exists():
        if os.path.lexists(path):
            shutil.rmtree(_replaced(path), ignore_errors=True)
        else:
            _replaced(path).rename(path)
