"""Writes a new file beside the one that it replaces, so that a power loss leaves one of them whole."""

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Any

import torch


class Replacement:
    """A file that ``torch.save`` writes, and that then replaces the one at a path.

    Args:
        path: the path of the file; a link there is followed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).resolve()
        self._temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.saving")

    def write(self, state: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Write and sync the new file, beside the old one.

        Args:
            state: the object to save.
            args: further arguments of ``torch.save``, after the path.
            kwargs: further keyword arguments of it.
        """
        with self._temporary.open("wb") as file:
            torch.save(state, file, *args, **kwargs)
            file.flush()
            os.fsync(file.fileno())

    def commit(self) -> None:
        """Replace the old file, durably."""
        self._temporary.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Remove the new file, unless it has replaced the old one."""
        self._temporary.unlink(missing_ok=True)


def is_replaceable(target: object) -> bool:
    """Return whether a target of ``torch.save`` is the path of a regular file, or of nothing yet."""
    if not isinstance(target, str | os.PathLike):
        return False
    try:
        return stat.S_ISREG(Path(target).stat().st_mode)
    except OSError:
        return True  # If the path is wrong, writing raises an error that says so.


def write_in_place(state: Any, target: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
    """Write by ``torch.save`` to a device or an open file, which no other file can replace.

    Args:
        state: the object to save.
        target: the second argument of ``torch.save``.
        args: further arguments.
        kwargs: further keyword arguments.
    """
    torch.save(state, target, *args, **kwargs)
    if hasattr(target, "flush"):
        target.flush()  # A child ends without doing so.
    _sync(target)


def _sync(target: Any) -> None:  # noqa: ANN401
    try:
        file = target.fileno()
    except (AttributeError, OSError):
        return  # It is not a file of the operating system.
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # A pipe or a device has nothing to sync.
            raise
