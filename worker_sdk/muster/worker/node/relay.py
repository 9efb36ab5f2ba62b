"""The relay that torchrun's agent runs for the workers of its node."""

import logging
import os
import shutil
import weakref
from pathlib import Path

from muster.client.addresses import SOCKET
from muster.relay.listen_address import ListenError, parse_listen_address
from muster.relay.server import RelayConfig
from muster.relay.thread import RelayThread
from muster.worker.transport.fork_guard import GrpcUsage
from muster.worker.transport.socket_folder import make_socket_folder
from muster.worker.version import VERSION

logger = logging.getLogger(__name__)

NAME = "relay.sock"


class NodeRelay:
    """A relay on a socket that only this user may open. If it ends, its workers connect directly.

    Args:
        endpoint: the coordinator's.

    Raises:
        ListenError: no socket can be made.
        RuntimeError: the relay does not start.
    """

    def __init__(self, endpoint: str) -> None:
        self._usage = GrpcUsage("a relay")
        self._folder: Path | None = None
        try:
            self._folder = make_socket_folder(NAME)
            # A process may end without stop(), as torchrun does after a signal.
            weakref.finalize(self, _remove, self._folder, os.getpid())
            config = RelayConfig(
                listen=parse_listen_address(f"{SOCKET}{self._folder / NAME}"),
                upstream=endpoint,
                version=VERSION,
                in_agent=True,
            )
            self._thread = RelayThread(config)
        except BaseException:
            self._leave()
            raise
        self.endpoint = f"{self._thread.address},{endpoint}"
        """For the workers: the relay, and the coordinator if it does not answer."""

    def stop(self, timeout: float = 5.0) -> None:
        """Ask the workers to connect directly, and end. In a forked child it does nothing.

        Args:
            timeout: seconds to wait for the end.
        """
        try:
            self._thread.stop(timeout)
        finally:
            self._leave()

    def _leave(self) -> None:
        self._usage.end()
        if self._folder is not None:
            _remove(self._folder, self._usage.process)


def start(endpoint: str) -> NodeRelay | None:
    """Start a relay for this node's workers. If it fails, log a warning and return None: they do without.

    Args:
        endpoint: the coordinator's.
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
