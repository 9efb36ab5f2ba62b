"""Starts the fork server of a node, for torchrun's agent."""

import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence

from muster.preload.messages import PER_WORKER, SOCKET_VARIABLE
from muster.worker.transport.socket_folder import make_socket_folder

logger = logging.getLogger(__name__)

NAME = "preload.sock"
PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); from muster.preload.fork_server import main; main()"
)
"""Without the current folder on the path, where a script does not look for modules either."""


class ForkServerProcess:
    """The fork server of this agent. It ends with the agent, at the latest.

    Args:
        modules: what it imports.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._folder = make_socket_folder(NAME)
        self._path = str(self._folder / NAME)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(self._path)
                listener.listen(socket.SOMAXCONN)
                self._process = subprocess.Popen(
                    [
                        *(sys.executable, "-u", "-c", PROGRAM, "--listener", str(listener.fileno())),
                        *("--agent", str(os.getpid()), "--modules", ",".join(modules)),
                    ],
                    stdin=subprocess.DEVNULL,
                    # As torchrun gives it to workers. Libraries of C set variables that it does not have.
                    env={name: value for name, value in os.environ.items() if name not in PER_WORKER},
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
        except OSError:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._agent, self.pid = os.getpid(), self._process.pid
        logger.info("process %d imports %s for this node's workers", self.pid, ", ".join(modules))
        os.environ[SOCKET_VARIABLE] = self._path

    def stop(self) -> None:
        """End it. Its launchers kill the workers that are left. In a forked child it does nothing."""
        if os.getpid() != self._agent:
            return
        if os.environ.get(SOCKET_VARIABLE) == self._path:
            del os.environ[SOCKET_VARIABLE]
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def start_fork_server(modules: Sequence[str]) -> ForkServerProcess | None:
    """Start a fork server. If it fails, log a warning and return None: workers import modules themselves.

    Args:
        modules: what it imports; none: there is to be no fork server.
    """
    if not modules:
        return None
    try:
        return ForkServerProcess(modules)
    except OSError as error:
        logger.warning("workers start without preloaded modules: there is no fork server: %s", error)
        return None
