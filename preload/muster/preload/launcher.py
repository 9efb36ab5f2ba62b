"""``muster-python``: Python for torchrun's workers, with what they import imported already.

torchrun starts the program that the variable ``PYTHON_EXEC`` names in place of Python.
"""

import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from muster.preload.messages import (
    FORWARDED,
    MAX_BYTES,
    SOCKET_VARIABLE,
    Command,
    Ended,
    ProcessContext,
    Refused,
    Reply,
    Started,
    StartRequest,
    decode_reply,
)

START_TIMEOUT = 120.0
"""Seconds that a launcher waits for the imports of the fork server. Then it imports them itself."""
END_TIMEOUT = 60.0
"""Seconds that it waits for the end of a worker that it has killed."""
NO_SERVER = "the fork server of this node has ended; the agent's output says why, or it was killed"
TO_PROCESS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""They go to the worker itself, and all others to its process group, as torchrun sends them."""


class _Signals:
    """Catches the signals that are to be passed on.

    Their numbers come by a pipe: a handler in Python runs too late for a signal that comes right before a
    call that waits. Signals that this process ignores, its worker ignores as well.
    """

    def __init__(self) -> None:
        self._numbers, self._written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._caught = [one for one in FORWARDED if signal.getsignal(one) is not signal.SIG_IGN]
        signal.set_wakeup_fd(self._written)
        for number in self._caught:
            signal.signal(number, lambda _number, _frame: None)

    def fileno(self) -> int:
        """Return the file that is readable when signals have come."""
        return self._numbers

    def read(self) -> bytes:
        """Return the numbers of the signals that have come, a byte for each."""
        with suppress(BlockingIOError):
            return os.read(self._numbers, 4096)
        return b""

    def restore(self) -> None:
        """Let signals end this process again, also those that have come."""
        for number in self._caught:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        for come in self.read():
            signal.raise_signal(come)
        os.close(self._numbers)
        os.close(self._written)


def main() -> NoReturn:
    """Have the fork server start the worker, and end as it does; without a fork server become the worker."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = sys.argv[1:]
    path = os.environ.pop(SOCKET_VARIABLE, "")  # A worker that runs torchrun itself has no use for it.
    if path:
        reason = _find_obstacle(arguments) or _launch(path, arguments)
        print(f"muster-python: this worker starts without preloaded modules: {reason}.", file=sys.stderr)
    os.execv(sys.executable, [sys.executable, *arguments])


def _find_obstacle(arguments: list[str]) -> str | None:
    """Return why a command cannot run in a forked worker; None if it can."""
    command = Command.parse(arguments)
    if command is None:
        return f"Python's arguments are {' '.join(arguments)}"
    if not command.is_module:
        try:
            if b"\0" in Path(command.target).read_bytes():
                return f"{command.target} is no source file"
        except OSError as error:
            return f"{command.target} cannot be read: {error.strerror}"
    return None


def _launch(path: str, arguments: list[str]) -> str:
    """Run the worker from the fork server, and exit. Return why it cannot be forked."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.connect(path)
        except OSError:
            return NO_SERVER
        signals = _Signals()
        match _ask(connection, StartRequest(tuple(arguments), ProcessContext.current()), signals):
            case Started(worker):
                status = _await_end(connection, worker, signals)
            case Ended(status):  # Before it had begun.
                pass
            case Refused(reason):
                signals.restore()
                return reason
    sys.exit(_exit_code(status))


def _ask(connection: socket.socket, request: StartRequest, signals: _Signals) -> Reply:
    """Return the first reply, within ``START_TIMEOUT``. Without a reply, no worker runs.

    A signal that comes before ends this process.
    """
    message = request.encode()
    if len(message) > MAX_BYTES:
        return Refused(f"its arguments and environment take {len(message):,} bytes, more than {MAX_BYTES:,}")
    try:
        socket.send_fds(connection, [message], [0, 1, 2])
        ready, _, _ = select.select([connection.fileno(), signals.fileno()], [], [], START_TIMEOUT)
        if connection.fileno() not in ready:
            connection.shutdown(socket.SHUT_RD)  # From now on, no worker can say that it begins.
        message = connection.recv(MAX_BYTES)
    except ConnectionError:
        return Refused(NO_SERVER)
    except OSError as error:
        return Refused(f"the fork server cannot be asked: {error}")
    if message:
        return decode_reply(message)
    return Refused(NO_SERVER if ready else f"the fork server was not ready within {START_TIMEOUT:g} s")


def _send(worker: int, number: int) -> None:
    """Send a signal to a worker, if it has not ended."""
    with suppress(ProcessLookupError):
        if number in TO_PROCESS:
            os.kill(worker, number)
        else:
            os.killpg(worker, number)


def _await_end(connection: socket.socket, worker: int, signals: _Signals) -> int:
    """Return the status with which a worker has ended. Pass signals on to it meanwhile.

    Raises:
        SystemExit: the fork server has ended before it.
    """
    try:
        pidfd = os.pidfd_open(worker)
    except ProcessLookupError:
        pidfd = None
    files = [connection.fileno(), signals.fileno()]
    while connection.fileno() not in select.select(files, [], [])[0]:
        for number in signals.read():
            _send(worker, number)
    try:
        message = connection.recv(MAX_BYTES)
    except ConnectionError:
        message = b""
    reply = decode_reply(message) if message else None
    if isinstance(reply, Ended):
        return reply.status
    _send(worker, signal.SIGKILL)
    if pidfd is not None:  # Its GPU and ports are free then, for the next worker.
        select.select([pidfd], [], [], END_TIMEOUT)
    sys.exit(
        f"muster-python: the fork server of this node was killed. So worker {worker} was killed, too: its "
        "exit status would be lost. Look into the kernel's log, such as for a lack of memory."
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
