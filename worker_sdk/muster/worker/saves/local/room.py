"""Checks before a write that the local folder has room for it."""

import errno
import shutil
from pathlib import Path

from muster.worker.groups.reason import causes
from muster.worker.saves.memory.staging import available_memory, fits, local_ranks
from muster.worker.saves.storage.direct_file import file_system_of

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a write for which there is no room."""
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
    advice = "Make room there, or give keepers a lower quota (MUSTER_LOCAL_QUOTA)."
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


def lacks_room(error: BaseException) -> bool:
    """Return whether an error, or one that led to it, says that there is no room.

    Torch's writer raises an error of its own while it handles that of a full disk.
    """
    return any(
        isinstance(one, MemoryError) or (isinstance(one, OSError) and one.errno in NO_ROOM)
        for one in causes(error)
    )


def shortage(folder: Path, wanted: int) -> str:
    """Return what is to be said of a write that the folder had no room for."""
    try:
        free = _gib(shutil.disk_usage(folder).free)
    except OSError:
        free = "an unknown part"
    return f"the local copy takes {_gib(wanted)}, and writing it to {folder} failed: {free} is free"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
