"""Makes a folder for a socket that only this user may open."""

import os
import tempfile
from pathlib import Path

from muster.client.addresses import MAX_PATH_BYTES

SHORT = Path("/tmp")
"""The folder's parent if the usual one has too long a path for a socket."""


def make_socket_folder(name: str) -> Path:
    """Return a new folder. Its path leaves room for a socket.

    Args:
        name: the socket's file name.
    """
    folder = Path(tempfile.mkdtemp(prefix="muster-"))
    if len(os.fsencode(folder / name)) > MAX_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="muster-", dir=SHORT))
    return folder
