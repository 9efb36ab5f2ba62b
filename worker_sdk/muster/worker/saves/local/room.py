"""Checks before a write that the local folder has room for it."""

import errno
import shutil
from pathlib import Path

from muster.worker.saves.memory.staging import available_memory, fits, local_ranks
from muster.worker.saves.storage.direct_file import file_system_of

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
"""File systems whose files are in memory, and count for the pod's limit."""


def check_room(folder: Path, wanted: int) -> None:
    """Refuse to write what the folder has no room for, before the first byte.

    The node's ranks write at the same time, and each of them is to have an equal part of the room.

    Args:
        folder: where it goes.
        wanted: bytes.

    Raises:
        OSError: the disk has less room.
        MemoryError: the folder is in memory, and that would have processes killed.
    """
    ranks = local_ranks()
    room = shutil.disk_usage(folder).free // ranks
    part = f" for each of this node's {ranks} ranks" if ranks > 1 else ""
    advice = "Make room there, give keepers a lower quota (MUSTER_LOCAL_QUOTA), or save without local=."
    if wanted > room:
        raise OSError(
            errno.ENOSPC,
            f"the local copy takes {_gib(wanted)}, and {folder} has {_gib(room)} of room{part}. {advice}",
        )
    if file_system_of(folder.stat().st_dev) not in IN_MEMORY:
        return
    free = available_memory() // ranks
    if not fits(wanted, free):
        raise MemoryError(
            f"the local copy takes {_gib(wanted)}, {folder} is in memory, and there are {_gib(free)} of free "
            f"memory{part}: it would have processes killed. {advice}"
        )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
