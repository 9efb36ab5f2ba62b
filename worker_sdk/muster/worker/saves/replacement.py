"""Writes a file beside the one whose place it takes, so that a power loss leaves one of them whole."""

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Any

import torch


class Replacement:
    """What ``torch.save`` writes to a path.

    Args:
        path: where the file is to be; a link there is followed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path).resolve()
        self._temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}.saving")

    def write(self, state: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Write the file beside the other, to the disk.

        Args:
            state: what is saved.
            args: further arguments of ``torch.save``, after the path.
            kwargs: further keyword arguments of it.
        """
        with self._temporary.open("wb") as file:
            torch.save(state, file, *args, **kwargs)
            file.flush()
            os.fsync(file.fileno())

    def commit(self) -> None:
        """Let it take the other's place, also after a power loss."""
        self._temporary.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def discard(self) -> None:
        """Remove it, unless it has taken the other's place."""
        self._temporary.unlink(missing_ok=True)


def is_replaceable(target: object) -> bool:
    """Whether a target of ``torch.save`` is the path of a file, or of nothing yet; a device is not."""
    if not isinstance(target, str | os.PathLike):
        return False
    try:
        return stat.S_ISREG(Path(target).stat().st_mode)
    except OSError:
        return True  # Writing will say what is wrong with it, if anything is.


def write_in_place(state: Any, target: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
    """``torch.save`` to a device or an open file, which can have nothing beside it.

    Args:
        state: what is saved.
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
        return  # It is no file of the system.
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # A pipe or a device has nothing to sync.
            raise
