"""A folder of checkpoints that cannot lie: what has a checkpoint's name is one.

A save is written under a name that begins with a dot, and gets its own by one rename, when every rank has
written and all that it needs is on the disk. A marker inside records what it is.
"""

import json
import logging
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from muster.worker.saves.committed import WIDTH, check_types
from muster.worker.saves.committed import Committed as Committed
from muster.worker.saves.committed import Life as Life
from muster.worker.saves.committed import UncommittedError as UncommittedError

logger = logging.getLogger(__name__)

MARKER = "committed.json"
LEFT = (".step-", ".removed-")
"""How the names begin of what is no checkpoint yet, or no more."""


class CheckpointDirectory:
    """The checkpoints of one job.

    Args:
        folder: where they are; it is made if it is not there.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(
                f"{folder} cannot be written by this user. Mend its permissions, or name another."
            )

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self.folder / f"step-{step:0{WIDTH}}"

    def unfinished(self, step: int, life: Life) -> Path:
        """Where a step is written before it is committed.

        Args:
            step: the step.
            life: what makes the name this save's own, the same for all ranks.
        """
        return self.folder / f".step-{step:0{WIDTH}}.{life.generation}-{life.number}"

    def commit(self, unfinished: Path, made: Committed) -> None:
        """Make a written save a checkpoint, on the disk and for good."""
        marker = {key: value for key, value in asdict(made).items() if key != "path"}
        write_marker(unfinished, marker)
        unfinished.rename(made.path)
        sync(self.folder)

    def read(self, path: Path) -> Committed:
        """What a checkpoint is.

        Raises:
            UncommittedError: it is none.
        """
        try:
            return self._marked(path)
        except (OSError, ValueError, TypeError) as error:
            raise UncommittedError(
                f"{path} is not a committed checkpoint: {error}. A save that was not finished, or that "
                f"another program wrote, is not loaded; the last committed one here is {self._last_name()}."
            ) from error

    def all(self) -> list[Committed]:
        """The committed checkpoints, oldest step first."""
        while True:
            found, vanished = self._look()
            if not vanished:
                return found
            # Retention removes a checkpoint when there is a newer one, which this look may have missed.

    def _look(self) -> tuple[list[Committed], bool]:
        """The committed checkpoints, oldest step first; whether one vanished at the look."""
        found = []
        vanished = False
        for path in self.folder.glob("step-*"):
            try:
                found.append(self._marked(path))
            except (FileNotFoundError, NotADirectoryError):
                vanished = vanished or not os.path.lexists(path)  # Else it is not ours.
            except (OSError, ValueError, TypeError) as error:
                logger.warning("%s is passed over: its marker cannot be read: %s", path, error)
        return sorted(found, key=lambda made: made.step), vanished

    def _marked(self, path: Path) -> Committed:
        if path.name.startswith(LEFT):
            raise ValueError("it was not committed, or is being removed")
        made = Committed(**json.loads((path / MARKER).read_text()), path=path)
        check_types(made)
        if path.name.startswith("step-") and path.name != self.path(made.step).name:
            raise ValueError(f"its {MARKER} says that it is step {made.step}")
        return made

    def latest(self) -> Committed | None:
        """The committed checkpoint of the highest step."""
        checkpoints = self.all()
        return checkpoints[-1] if checkpoints else None

    def sweep(self, keep_last: int | None, decided: Life | None = None) -> None:
        """Remove what failed saves have left, and all but the last checkpoints.

        Args:
            keep_last: how many checkpoints to keep; None keeps all.
            decided: the last save that is decided. What is later, by its name, is still being written: other
                ranks may have begun a save that this one has yet to hear of. None: nothing is being written.
        """
        for left in self.folder.glob(".removed-*"):
            shutil.rmtree(left, ignore_errors=True)
        for left in self.folder.glob(".step-*"):
            if decided is None or _life(left) <= decided:
                self._remove(left)
        if keep_last is not None:
            for old in self.all()[:-keep_last]:
                self._remove(Path(old.path))

    def _remove(self, path: Path) -> None:
        # Renamed first: half of a checkpoint must not look like one, nor half of what may yet become one.
        doomed = self.folder / f".removed-{path.name.removeprefix('.')}"
        try:
            path.rename(doomed)
        except OSError as error:
            # The checkpoint that was just made is no worse for it.
            logger.warning("%s cannot be removed: %s", path, error)
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def _last_name(self) -> str:
        last = self.latest()
        return Path(last.path).name if last is not None else "none"


def _life(unfinished: Path) -> Life:
    """The life in a name; that of a name which is not ours is over."""
    try:
        generation, number = unfinished.name.rpartition(".")[2].split("-")
        return Life(int(generation), int(number))
    except ValueError:
        return Life(-1, -1)


def write_marker(folder: Path, marker: dict[str, Any]) -> None:
    """Say in a folder what it is a checkpoint of, on the disk with its entries."""
    with (folder / MARKER).open("w") as file:
        json.dump(marker, file)
        file.flush()
        os.fsync(file.fileno())
    sync(folder)


def sync(folder: Path) -> None:
    """Put a folder's entries on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
