"""The storage that a user's folder or address names."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec import available_protocols

from muster.worker.saves.storage.checkpoint_storage import CheckpointStorage
from muster.worker.saves.storage.folder_storage import FolderStorage

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/{0,2})(.*)")
_FOLDERS = ("file", "local")
"""Schemes of what can rename."""


def open_storage(folder: str | Path, options: Mapping[str, Any] | None, run_id: str) -> CheckpointStorage:
    """Open the storage of a job's checkpoints.

    Args:
        folder: a folder, or an address with a scheme.
        options: for what opens the address.
        run_id: of the job.

    Raises:
        ValueError: the address is not valid, or a folder is given options.
        ImportError: the package that opens it is not installed.
        OSError: nothing can be written there.
    """
    check_options(folder, options)
    path = _path(folder)
    if path is not None:
        return FolderStorage(Path(path), run_id)
    # What opens buckets is loaded only for them.
    from muster.worker.saves.storage.bucket_storage import BucketStorage

    return BucketStorage(str(folder), options or {}, run_id)


def check_options(folder: str | Path, options: Mapping[str, Any] | None) -> None:
    """Refuse options of a folder.

    Raises:
        ValueError: a folder is given options, or the address is not valid.
    """
    if options and _path(folder) is not None:
        raise ValueError(
            f"{folder} is a folder, for which there are no storage_options. Name a scheme, as in s3://."
        )


def absolute(folder: str | Path) -> str:
    """Return the name of a storage for another process of this machine, without a look at the storage.

    Args:
        folder: a folder, or an address with a scheme.

    Returns:
        An absolute path, or the address.

    Raises:
        ValueError: the address is not valid.
    """
    path = _path(folder)
    return str(folder) if path is None else str(Path(path).absolute())


def _path(folder: str | Path) -> str | None:
    """Return the path of a folder; None for an address.

    Raises:
        ValueError: it is neither.
    """
    scheme = _SCHEME.fullmatch(str(folder))
    if scheme is not None and scheme[2] != "//" and "::" not in str(folder):
        if scheme[1] not in available_protocols():
            return str(folder)  # Whose name has a colon.
        raise ValueError(
            f"{folder} is neither a folder nor an address. Write {scheme[1]}://{scheme[3]}, as text; or ./ "
            "before the name of a folder that has a colon."
        )
    if scheme is None:
        return str(folder)
    return scheme[3] if scheme[1] in _FOLDERS else None
