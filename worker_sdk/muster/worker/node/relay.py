"""The relay that torchrun's agent runs for the workers of its node."""

import logging
import os
import shutil
import tempfile
import weakref
from pathlib import Path

from muster.client.addresses import MAX_PATH_BYTES, SOCKET
from muster.relay.listen_address import ListenError, parse_listen_address
from muster.relay.server import RelayConfig
from muster.relay.thread import RelayThread
from muster.worker.transport.fork_guard import Claim
from muster.worker.version import VERSION

logger = logging.getLogger(__name__)

NAME = "relay.sock"
SHORT = Path("/tmp")
"""Where its folder is made if the usual place for such has too long a path for a socket."""


class NodeRelay:
    """A relay on a socket that only this user may open. Its workers do without it once it is gone.

    Args:
        endpoint: of the coordinator.

    Raises:
        ListenError: no socket can be made.
        RuntimeError: it does not begin.
    """

    def __init__(self, endpoint: str) -> None:
        self._claim = Claim("a relay")
        self._folder: Path | None = None
        try:
            self._folder = _folder()
            # Also where the process ends without a word, as torchrun does after a signal.
            weakref.finalize(self, _remove, self._folder, os.getpid())
            config = RelayConfig(
                listen=parse_listen_address(f"{SOCKET}{self._folder / NAME}"),
                upstream=endpoint,
                version=VERSION,
            )
            self._thread = RelayThread(config)
        except BaseException:
            self._leave()
            raise
        self.endpoint = f"{self._thread.address},{endpoint}"
        """For the workers: the relay, and the coordinator if it does not answer."""

    def stop(self, timeout: float = 5.0) -> None:
        """Ask the workers to connect directly, and end; in a forked child it does nothing.

        Args:
            timeout: seconds to wait for the end.
        """
        try:
            self._thread.stop(timeout)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._claim.give_back()
        if self._folder is not None:
            _remove(self._folder, self._claim.process)


def begin(endpoint: str) -> NodeRelay | None:
    """A relay for the workers of this node; None, and a warning, if there can be none: it is not needed.

    Args:
        endpoint: of the coordinator.
    """
    try:
        return NodeRelay(endpoint)
    except (ListenError, RuntimeError, OSError) as error:
        logger.warning("this node has no relay, and its workers connect directly: %s", error)
        return None


def _remove(folder: Path, owner: int) -> None:
    """Remove the socket's folder, unless this is a forked child."""
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="muster-"))
    if len(os.fsencode(folder / NAME)) > MAX_PATH_BYTES:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="muster-", dir=SHORT))
    return folder
