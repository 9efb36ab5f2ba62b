"""A checkpoint of any name: written beside it, and renamed once when all ranks have written."""

import json
import logging
import os
import re
import shutil
import uuid
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from muster.checkpoint.committed import MARKER, UncommittedError
from muster.checkpoint.directory import sync, write_marker

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
        alias: what stands for the name while it is written, where a framework takes whatever has the name in
            its own for a checkpoint; default: the name.
        within: write it into a folder that stands there, under this name; default: there itself.
        run_id: of the job, where others may write beside it, or have done so.
    """

    def __init__(
        self,
        path: Path,
        generation: int,
        number: int,
        alias: str = "",
        within: str = "",
        run_id: str | None = None,
    ) -> None:
        self.path = path
        self._alias = alias or path.name
        own = "" if run_id is None else f"-{zlib.crc32(run_id.encode()):08x}"
        self._place = path.with_name(f".{self._alias}.{generation}-{number}{own}")
        self.unfinished = self._place / within
        """Where it is written."""

    def begin(self) -> None:
        """Make the folder that is written to, and remove what saves of this name have left."""
        self.prepare()
        self.unfinished.mkdir()

    def prepare(self) -> None:
        """As :meth:`begin`, where the framework makes the folder, or writes a file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _restore(self.path)
        sweep(self.path.parent, self._alias)

    def give_up(self) -> None:
        """Remove what was written, unless it was committed."""
        remove(self._place)

    def commit(self, marker: Marker) -> None:
        """When all have written: make it the checkpoint, on the disk and for good.

        One of the same name is replaced. At each moment there is the old one or the new one, and
        :func:`read` finds it. A checkpoint that is a file has no marker.

        Raises:
            OSError: it could not be done, or another life of the job has removed what was written.
        """
        folder = self.unfinished.is_dir()
        if folder:
            write_marker(self.unfinished, asdict(marker))
        else:
            sync_file(self.unfinished)
        foreign = None
        if _is_committed(self.path):
            remove(_replaced(self.path))
            self.path.rename(_replaced(self.path))
        elif (folder or _is_folder(self.path)) and os.path.lexists(self.path):  # Else one rename replaces it.
            foreign = _doomed(self.path)
            self.path.rename(foreign)
        try:
            self.unfinished.rename(self.path)
        except OSError:
            if foreign is not None:
                foreign.rename(self.path)
            _restore(self.path)
            raise
        if foreign is not None:
            _destroy(foreign)
        try:
            sync(self.path.parent)
        except OSError as error:
            # It has its name, so that nobody may say that it was not committed.
            logger.warning("%s has its name, and may lose it if this machine fails now: %s", self.path, error)
            return
        for left in (_replaced(self.path), self._place):
            with suppress(OSError):
                remove(left)


def check_name(path: Path, content: str = "") -> None:
    """See that what a save would replace is a checkpoint, torn or not, or nothing.

    Args:
        path: the checkpoint's name.
        content: the name of a file that is in a framework's own checkpoints, beside torch's.

    Raises:
        IsADirectoryError: it is a folder of something else.
    """
    if path.is_dir() and not path.is_symlink():
        names = {entry.name for entry in path.iterdir()}
        known = names & {MARKER, content} or any(name.endswith(".distcp") for name in names)
        if names and not known:
            raise IsADirectoryError(
                f"{path} is a folder, and no checkpoint: it is not replaced. Name another."
            )


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


def restore(folder: Path) -> list[Path]:
    """Give checkpoints their names back, of which the processes have died that replaced them.

    Args:
        folder: where checkpoints have their names.

    Returns:
        Those that have them back.
    """
    names = [
        left.with_name(left.name.removeprefix(".").removesuffix(REPLACED))
        for left in folder.glob(f".*{REPLACED}")
    ]
    without = [path for path in names if not os.path.lexists(path)]
    for path in without:
        _restore(path)
    return [path for path in without if os.path.lexists(path)]


def sweep(folder: Path, alias: str | None = None, but: Path | None = None) -> None:
    """Remove what saves have left, and those whom nobody needs any more.

    Args:
        folder: where checkpoints have their names.
        alias: of the saves, as in :class:`Aside`; default: any.
        but: what is being written now.
    """
    unfinished = re.compile(rf"\.{'.+' if alias is None else re.escape(alias)}\.\d+-\d+(-[0-9a-f]{{8}})?")
    for left in folder.iterdir() if folder.is_dir() else ():
        if left.name.startswith(REMOVED):
            _destroy(left)
        elif unfinished.fullmatch(left.name) and (but is None or left not in (but, *but.parents)):
            remove(left)


def remove(path: Path) -> None:
    """Remove a checkpoint, or what may have become one.

    Args:
        path: of a folder, a file or a link; it need not be there.
    """
    if os.path.lexists(path):
        _destroy(retire(path))


def retire(path: Path) -> Path:
    """Take a checkpoint's name away, before it is removed.

    Half of a checkpoint must not look like one, and who still writes it must not commit it.

    Returns:
        Where it is to be removed; whoever sweeps the folder does so, too.
    """
    doomed = _doomed(path)
    path.rename(doomed)
    return doomed


def sync_below(folder: Path) -> None:
    """Put all files and folders below one on the disk."""
    for path in folder.rglob("*"):
        sync(path) if path.is_dir() else sync_file(path)


def sync_file(path: Path) -> None:
    """Put a file's content on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _marker(path: Path) -> Marker:
    return Marker(**json.loads((path / MARKER).read_text()))


def _is_committed(path: Path) -> bool:
    with suppress(OSError, ValueError, TypeError):
        return bool(_marker(path))
    return False


def _doomed(path: Path) -> Path:
    return path.with_name(f"{REMOVED}{uuid.uuid4().hex}")


def _replaced(path: Path) -> Path:
    return path.with_name(f".{path.name}{REPLACED}")


def _restore(path: Path) -> None:
    """End a replacement that was left half-way."""
    if _is_committed(path):
        remove(_replaced(path))
    elif _is_committed(_replaced(path)) and not os.path.lexists(path):
        _replaced(path).rename(path)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _destroy(path: Path) -> None:
    """Remove what is no checkpoint any more, as far as that can be done."""
    if _is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
