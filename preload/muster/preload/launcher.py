"""``muster-python``: Python for torchrun's workers, with what they import imported already.

torchrun starts the program that the variable ``PYTHON_EXEC`` names in place of Python.
"""

import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from muster.preload.messages import (
    MAX_BYTES,
    SOCKET,
    Ended,
    Interpreter,
    Refused,
    Reply,
    Started,
    StartRequest,
    decode_reply,
)

START_TIMEOUT = 120.0
"""Seconds that a launcher waits for the imports of the fork server. Then it imports them itself."""
NO_SERVER = "this node has no fork server any more, and the log says why, or it was killed"
FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)


class _Signals:
    """Passes signals on to the worker's process group, as soon as there is one."""

    def __init__(self) -> None:
        self._worker: int | None = None
        self._early: list[int] = []
        self._previous = {number: signal.signal(number, self._forward) for number in FORWARDED}

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        if self._worker is None:
            self._early.append(number)
        else:
            kill(self._worker, number)

    def forward_to(self, worker: int) -> None:
        """Pass on what has come, and will come."""
        self._worker = worker
        for number in self._early:
            kill(worker, number)

    def restore(self) -> None:
        """Take signals as before; what has come meanwhile comes once more."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        for early in self._early:
            signal.raise_signal(early)


def kill(worker: int, number: int) -> None:
    """Send a signal to the process group of a worker, if it has not ended."""
    with suppress(ProcessLookupError):
        os.killpg(worker, number)


def main() -> NoReturn:
    """Have the fork server start the worker, and end as it does; without a fork server become the worker."""
    arguments = sys.argv[1:]
    path = os.environ.get(SOCKET)
    if path:
        reason = _launch(path, arguments)
        print(f"muster-python: this worker starts without preloaded modules: {reason}.", file=sys.stderr)
    os.execv(sys.executable, [sys.executable, *arguments])


def _launch(path: str, arguments: list[str]) -> str:
    """Run the worker from the fork server, and exit. Return why it cannot be forked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(path)
        except OSError:
            return NO_SERVER
        signals = _Signals()
        match _ask(connection, StartRequest(tuple(arguments), Interpreter.current())):
            case Started(worker):
                signals.forward_to(worker)
                status = _await_end(connection, worker)
            case Ended(status):  # Before it had begun.
                pass
            case Refused(reason):
                signals.restore()
                return reason
    sys.exit(_exit_code(status))


def _ask(connection: socket.socket, request: StartRequest) -> Reply:
    """Return the first reply. Without a reply, no worker runs."""
    connection.settimeout(START_TIMEOUT)
    try:
        socket.send_fds(connection, [request.encode()], [0, 1, 2])
        message = connection.recv(MAX_BYTES)
    except TimeoutError:
        return Refused(f"the fork server was not ready within {START_TIMEOUT:g} s")
    except ConnectionError:
        message = b""
    except OSError as error:
        return Refused(f"the fork server cannot be asked: {error}")
    return decode_reply(message) if message else Refused(NO_SERVER)


def _await_end(connection: socket.socket, worker: int) -> int:
    """Return the status with which a worker has ended."""
    connection.settimeout(None)
    try:
        message = connection.recv(MAX_BYTES)
    except ConnectionError:
        message = b""
    reply = decode_reply(message) if message else None
    if isinstance(reply, Ended):
        return reply.status
    kill(worker, signal.SIGKILL)
    sys.exit(
        f"muster-python: the fork server of this node was killed, so worker {worker} was killed, too: "
        "its end would not be seen. Look into the kernel's log, such as for a lack of memory."
    )


def _exit_code(status: int) -> int:
    """Return the exit code of a worker; if a signal has ended it, end by the same signal."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # The worker has left one, if it was to.
        with suppress(OSError):  # SIGKILL has no handler.
            signal.signal(-code, signal.SIG_DFL)
        signal.raise_signal(-code)
    return code
