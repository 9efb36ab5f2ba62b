"""Records what a save puts on the disk, to see that nothing is committed before."""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Synced:
    """What was synced, in order, and what was renamed."""

    files: dict[int, int] = field(default_factory=dict)
    """By inode, the size when a file was last synced."""
    folders: dict[int, set[str]] = field(default_factory=dict)
    """By inode, the entries when a folder was last synced."""
    at_rename: dict[str, "Synced"] = field(default_factory=dict)
    """By the name that something was given by a rename: what was synced by then."""

    @classmethod
    def record(cls, monkeypatch: pytest.MonkeyPatch) -> "Synced":
        """Begin to record."""
        recorded = cls()
        fsync, rename = os.fsync, os.rename

        def recording_fsync(handle: Any) -> None:
            fsync(handle)
            number = handle if isinstance(handle, int) else handle.fileno()
            about = os.fstat(number)
            if stat.S_ISDIR(about.st_mode):
                recorded.folders[about.st_ino] = _names(Path(f"/proc/self/fd/{number}"))
            else:
                recorded.files[about.st_ino] = about.st_size

        def recording_rename(source: Any, target: Any) -> None:
            recorded.at_rename[str(target)] = Synced(dict(recorded.files), dict(recorded.folders))
            rename(source, target)

        monkeypatch.setattr(os, "fsync", recording_fsync)
        monkeypatch.setattr(os, "rename", recording_rename)
        return recorded

    def check_committed(self, path: Path) -> None:
        """See that all of a checkpoint was synced before it had its name, and then its name."""
        before = self.at_rename[str(path)]
        if path.is_file():
            assert before.files.get(path.stat().st_ino) == path.stat().st_size, "it was not synced as it is"
        for folder, _, names in os.walk(path):
            for name in names:
                about = Path(folder, name).stat()
                assert before.files.get(about.st_ino) == about.st_size, f"{name} was not synced as it is"
            missing = _names(Path(folder)) - before.folders.get(Path(folder).stat().st_ino, set())
            assert not missing, f"{missing} in {folder} were not synced"
        assert path.name in self.folders[path.parent.stat().st_ino], "its name was not synced"

    def check_made(self, folder: Path) -> None:
        """See that the entry of a folder that was made was synced."""
        assert folder.name in self.folders.get(folder.parent.stat().st_ino, set()), f"{folder} was not synced"


def _names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}
