"""Takes checkpoints for committed that were saved without an adapter."""

import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from muster.checkpoint.committed import UncommittedError
from muster.checkpoint.directory import write_marker
from muster.worker.integrations.commit.lookup import Marker, read, stamped


def adopt(path: str | os.PathLike[str], framework: str, files: str, prefix: str) -> None:
    """Mark a checkpoint as committed, as the last one in its folder.

    Args:
        path: of the checkpoint.
        framework: the name of the framework that saved it.
        files: the pattern of a file that all its checkpoints have.
        prefix: the group that decides its saves.

    Raises:
        FileNotFoundError: there is no checkpoint of the framework.
        FileExistsError: it is committed.
    """
    path = Path(path)
    if not any(path.glob(files)):
        raise FileNotFoundError(f"{path} is no checkpoint of {framework}: it has no {files}.")
    with suppress(UncommittedError):
        raise FileExistsError(f"{path} is committed: {read(path)[1]}.")
    write_marker(path, asdict(stamped(Marker("adopted", 0, 0, prefix, 0), path.parent)))
