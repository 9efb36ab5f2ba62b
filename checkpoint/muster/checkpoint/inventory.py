"""The checkpoints that are stored in a place, for people: committed, damaged and kept ones.

A place is a folder or an address with a scheme. It holds the checkpoints of a job, also those of a
framework's adapter, or is one checkpoint itself. Looking changes nothing there.
"""

import logging
import os
import re
from dataclasses import replace
from pathlib import Path

from muster.checkpoint.committed import MARKER, NO_STEP, Committed, committed_by_adapter, step_in, unseal
from muster.checkpoint.damage import DAMAGED
from muster.checkpoint.directory import (
    STEP,
    UNCOMMITTED,
    Entry,
    by_commit,
    committed_in,
    mark,
    names_in,
    read_entry,
    unmark,
)
from muster.checkpoint.retry import ABSENT, is_file, retrying
from muster.checkpoint.source import home, source_of
from muster.checkpoint.storage_options import storage_options
from muster.checkpoint.stored import MARKS, Inventory, NotCommittedError, StoredCheckpoint, content_size

logger = logging.getLogger(__name__)

_FOLDERS = ("file", "local")
"""Schemes of addresses that are folders."""
_REPLACED = re.compile(r"\.(.+)\.replaced")
"""The name of an adapter's old checkpoint while a new one replaces it."""
_CONTENT = {MARKER, DAMAGED, ".metadata"}
"""A folder with one of these files is one checkpoint, committed or not."""
_NAMES = (*UNCOMMITTED, STEP)
"""So is a folder whose name begins with one of these."""


def inventory_of(place: str, options: str = "") -> Inventory:
    """Return the inventory of a place.

    Args:
        place: a folder, or an address with a scheme.
        options: for a bucket, the text of ``MUSTER_STORAGE_OPTIONS``. A folder has no options.

    Raises:
        ValueError: the address is invalid, or the options are.
        ImportError: the package that opens the scheme is not installed.
        OSError: the store refuses the request.
    """
    scheme, separator, name = place.partition("://")
    if not separator:
        return FolderInventory(Path(place))
    if scheme in _FOLDERS:
        return FolderInventory(Path(name))
    # A folder needs no fsspec.
    from muster.checkpoint.bucket.inventory import BucketInventory

    return BucketInventory(place, storage_options(options))


class FolderInventory:
    """The checkpoints in a folder, or one that is a folder.

    Args:
        folder: the checkpoint, or the folder that holds them.
    """

    def __init__(self, folder: Path) -> None:
        # The name of a checkpoint is that of its folder, and not "." or that of a link.
        self._folder = Path(os.path.realpath(folder))
        self._given = folder

    def checkpoints(self) -> list[StoredCheckpoint]:
        """Return all committed checkpoints, newest commit first."""
        if is_file(self._folder):
            entries = [entry for entry in [_file_entry(self._folder)] if entry is not None]
            if not entries:
                raise NotCommittedError(
                    f"{self._given} is a file without a marker beside it, {home(self._folder)}. It is not a "
                    "committed checkpoint, or one that cannot be verified."
                )
            return self._all_stored(entries)
        names = retrying(str(self._given), lambda: sorted(names_in(self._folder)))
        if self._folder.name.startswith(_NAMES) or _CONTENT & set(names):
            entry = retrying(str(self._given), lambda: read_entry(self._folder, _marked))
            if entry is None:
                raise NotCommittedError(
                    f"{self._given} is not a committed checkpoint: it has no {MARKER}. A save that was not "
                    "finished, or that another program wrote, is not resumed from."
                )
            entries = [entry]
        else:
            entries = self._entries(names)
        return self._all_stored(entries)

    def _all_stored(self, entries: list[Entry]) -> list[StoredCheckpoint]:
        stored = [self._stored(entry) for entry in reversed(by_commit(entries))]
        return [one for one in stored if one is not None]

    def _entries(self, names: list[str]) -> list[Entry]:
        found: dict[str, Entry] = {}
        for name in sorted(names, key=lambda name: name.startswith(".")):
            replaced = _REPLACED.fullmatch(name)
            if name.startswith(".") and (replaced is None or replaced[1] in found or replaced[1][0] == "."):
                continue
            entry = self._entry(name)
            if entry is not None:
                found[name] = entry
        return list(found.values())

    def _entry(self, name: str) -> Entry | None:
        path = self._folder / name
        try:
            if is_file(path):
                return _file_entry(path)
            # Another name may be anything. It is a checkpoint if it has a marker.
            if not name.startswith(STEP) and MARKER not in names_in(path):
                return None
        except ABSENT:
            return None
        except PermissionError as error:
            if name.startswith(STEP):
                raise
            logger.warning("%s is passed over: %s", path, error)
            return None
        return retrying(str(path), lambda: read_entry(path, _marked))

    def _stored(self, entry: Entry) -> StoredCheckpoint | None:
        source = source_of(entry.path)
        try:
            sizes = retrying(source.place, source.sizes)
        except FileNotFoundError:
            return None  # Retention has just removed it.
        step = step_in(entry.path.name) if entry.made is None else entry.made.step
        return StoredCheckpoint(
            entry.path.name,
            None if step == NO_STEP else step,
            entry.made,
            (entry.made.committed_at if entry.made else 0.0) or _changed_at(home(entry.path) / MARKER),
            content_size(sizes),
            entry.damage,
            frozenset(sizes.keys() & MARKS),
            source,
        )

    def mark(self, one: StoredCheckpoint, name: str, data: bytes = b"") -> None:
        """Put a mark into a checkpoint, on the disk."""
        mark(Path(one.source.place), name, data)

    def unmark(self, one: StoredCheckpoint, name: str) -> None:
        """Take a mark out of a checkpoint, on the disk."""
        unmark(Path(one.source.place), name)


def _marked(path: Path) -> Committed:
    said = unseal((path / MARKER).read_bytes())
    return committed_in(path, said) if "step" in said else committed_by_adapter(said, path)


def _file_entry(path: Path) -> Entry | None:
    """Return what is known of a checkpoint that is a file; None if it has no marker beside it."""

    def marked(folder: Path) -> Committed:
        return committed_by_adapter(unseal((folder / MARKER).read_bytes()), path)

    entry = retrying(str(path), lambda: read_entry(home(path), marked))
    return None if entry is None else replace(entry, path=path)


def _changed_at(path: Path) -> float:
    """Return when a file was last changed. Markers of 0.1.0 do not say when they were committed."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
