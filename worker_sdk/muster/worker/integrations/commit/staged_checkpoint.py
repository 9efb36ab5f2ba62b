"""A checkpoint of any name: written beside it, and renamed once when all ranks have written."""

import logging
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from muster.checkpoint.committed import MARKER, run_mark
from muster.checkpoint.directory import make_folder, sync, sync_file, write_marker, write_synced
from muster.checkpoint.manifest import MANIFEST, Manifest, ManifestReference
from muster.checkpoint.retry import is_folder, lexists
from muster.checkpoint.source import beside
from muster.worker.integrations.commit.cleanup import (
    destroy,
    doomed_name,
    finish,
    is_real_folder,
    remove,
    restore_name,
    sweep,
)
from muster.worker.integrations.commit.lookup import Marker, is_committed, replaced_name, stamped

logger = logging.getLogger(__name__)


class StagedCheckpoint:
    """One save of a checkpoint, on the rank that commits it.

    Args:
        path: the checkpoint's name.
        generation: the job's life between restarts.
        number: of the save in it.
        run_id: of the job: others may write beside it, or have done so.
        alias: what stands for the name while it is written, where a framework takes whatever has the name in
            its own for a checkpoint; default: the name.
        within: write it into a folder that stands there, under this name; default: there itself.
    """

    def __init__(
        self,
        path: Path,
        generation: int,
        number: int,
        run_id: str,
        alias: str = "",
        within: str = "",
    ) -> None:
        self.path = path
        self._alias = alias or path.name
        self._place = path.with_name(f".{self._alias}.{generation}-{number}-{run_mark(run_id)}")
        self.unfinished = self._place / within
        """Where it is written."""

    def begin(self) -> None:
        """Make the folder that is written to, and remove what saves of this name have left."""
        self.prepare()
        self.unfinished.mkdir()

    def prepare(self) -> None:
        """As :meth:`begin`, where the framework makes the folder, or writes a file."""
        make_folder(self.path.parent)
        restore_name(self.path)
        finish(self.path)
        sweep(self.path.parent, self._alias)

    def give_up(self) -> None:
        """Remove what was written, unless it was committed."""
        remove(self._place)

    def commit(self, marker: Marker, manifest: Manifest | None = None) -> None:
        """When all have written: make it the checkpoint, on the disk and for good.

        One of the same name is replaced. At each moment there is the old one or the new one, and
        :func:`read` finds it. A checkpoint that is a file gets its marker and manifest beside it in the next
        moment. If this process dies before, :func:`finish` does so.

        Args:
            marker: describes it, without its place in the order of commits.
            manifest: its files and digests. A file must have been written ``within`` a folder.

        Raises:
            OSError: it could not be done, or another life of the job has removed what was written.
        """
        folder = is_folder(self.unfinished)
        described = self.unfinished if folder else self._place
        marker = stamped(marker, self.path.parent)
        if manifest is not None:
            data = manifest.encode()
            write_synced(described / MANIFEST, data)
            marker = replace(marker, manifest=ManifestReference.of(data))
        if not folder:
            sync_file(self.unfinished)
        write_marker(described, asdict(marker))
        self._take_away_beside()
        foreign = None
        if is_real_folder(self.path) and is_committed(self.path):
            remove(replaced_name(self.path))
            self.path.rename(replaced_name(self.path))
        elif (folder or is_real_folder(self.path)) and lexists(self.path):  # Else one rename replaces it.
            foreign = doomed_name(self.path)
            self.path.rename(foreign)
        try:
            self.unfinished.rename(self.path)
        except OSError:
            if foreign is not None:
                foreign.rename(self.path)
            finish(self.path)
            restore_name(self.path)
            raise
        if foreign is not None:
            destroy(foreign)
        try:
            sync(self.path.parent)
            if not folder:
                self._place.rename(beside(self.path))
                sync(self.path.parent)
        except OSError as error:
            # It has its name, so that nobody may say that it was not committed.
            logger.warning("%s has its name, and may lose it if this machine fails now: %s", self.path, error)
            return
        for left in (replaced_name(self.path), replaced_name(beside(self.path)), self._place):
            with suppress(OSError):
                remove(left)

    def _take_away_beside(self) -> None:
        """Before another file has the name: what describes the one that has it must not describe that."""
        old = beside(self.path)
        if lexists(old):
            remove(replaced_name(old))
            old.rename(replaced_name(old))
            sync(self.path.parent)


def check_name(path: Path, content: str = "") -> None:
    """See that what a save would replace is a checkpoint, torn or not, or nothing.

    Args:
        path: the checkpoint's name.
        content: the name of a file that is in a framework's own checkpoints, beside torch's.

    Raises:
        IsADirectoryError: it is a folder of something else.
        OSError: it cannot be looked at.
    """
    if is_real_folder(path):
        names = {entry.name for entry in path.iterdir()}
        known = names & {MARKER, content} or any(name.endswith(".distcp") for name in names)
        if names and not known:
            raise IsADirectoryError(
                f"{path} is a folder, and no checkpoint: it is not replaced. Name another."
            )
