"""The address where a relay listens: a port, or a Unix socket that no other user can replace."""

import errno
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from muster.client.addresses import SOCKET, checked, is_socket, target_of
from muster.client.errors import EnvironmentValueError


class ListenError(ValueError):
    """A relay cannot listen there. The message says why, and what to do."""


@dataclass(slots=True)
class ListenAddress:
    """An address to listen at."""

    address: str
    """``unix:///PATH`` or ``HOST:PORT``."""
    _own: tuple[int, int] | None = None
    """Device and inode of the relay's own socket, once it exists."""

    @property
    def path(self) -> Path | None:
        """The path of the Unix socket; None for a port."""
        return Path(self.address.removeprefix(SOCKET)) if is_socket(self.address) else None

    @property
    def target(self) -> str:
        """Its name in gRPC."""
        return target_of(self.address)

    def prepare(self) -> None:
        """Check that a relay may listen here. Make a missing folder, and remove the socket of a dead relay.

        Raises:
            ListenError: it may not.
        """
        path = self.path
        if path is None:
            return
        _check_folder(path)
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
        except OSError as error:
            raise ListenError(f"{self.address}: it cannot be looked at ({error.strerror}).") from error
        if not stat.S_ISSOCK(mode):
            raise ListenError(
                f"{self.address}: something that is no socket is there already. Name another path."
            )
        if _answers(path):
            raise ListenError(
                f"{self.address}: somebody listens there already. Stop that relay, or name another path."
            )
        try:
            path.unlink()
        except OSError as error:
            raise ListenError(
                f"{self.address}: a socket that nobody listens to is there, and cannot be removed "
                f"({error.strerror}). Remove it, or name another path."
            ) from error

    def restrict(self, mode: int) -> None:
        """Set the permissions of the socket's file, which decide which users may connect."""
        if self.path is not None:
            self._own = _identity(self.path)
            self.path.chmod(mode)

    def remove(self) -> None:
        """Remove the socket. If the next relay's socket has replaced it, leave that one."""
        if self.path is not None and self._own is not None and _identity(self.path) == self._own:
            self.path.unlink(missing_ok=True)


def parse_listen_address(given: str) -> ListenAddress:
    """Parse an address to listen at.

    Args:
        given: ``unix:///PATH`` or ``HOST:PORT``.

    Raises:
        ListenError: it is neither, or cannot be used.
    """
    try:
        address = checked(given)
    except EnvironmentValueError as error:
        raise ListenError(str(error)) from None
    if "," in address:
        raise ListenError(f'"{given}" is more than one place to listen at. Name one.')
    return ListenAddress(address)


def _check_folder(path: Path) -> None:
    """Refuse a folder that other users may write: they could put their own socket there."""
    folder = path.parent
    with suppress(OSError):
        # /run is empty after a boot, and every user may write a pod's volume. A failure shows below.
        folder.mkdir(0o755)
    try:
        status = folder.stat()
    except OSError as error:
        raise ListenError(
            f"{SOCKET}{path}: its folder, {folder}, cannot be looked at ({error.strerror}). Make it, for the "
            "relay's user alone."
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise ListenError(f"{SOCKET}{path}: {folder} is no folder. Name another path.")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ListenError(
            f"{SOCKET}{path}: others may write its folder, {folder} (mode {stat.S_IMODE(status.st_mode):o}), "
            "and could put a socket of their own there. Run: chmod go-w on it, or name another."
        )
    if status.st_uid not in (0, os.geteuid()):
        raise ListenError(
            f"{SOCKET}{path}: its folder, {folder}, belongs to user {status.st_uid}, who could put a socket "
            "there. Name a folder of the relay's own user."
        )


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
        return True


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
