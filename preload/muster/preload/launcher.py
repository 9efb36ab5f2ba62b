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
from types import FrameType
from typing import NoReturn

from muster.preload.messages import (
    FORWARDED,
    MAX_BYTES,
    SOCKET,
    Command,
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
END_TIMEOUT = 60.0
"""Seconds that it waits for the end of a worker that it has killed."""
NO_SERVER = "the fork server of this node has ended; the agent's output says why, or it was killed"
TO_PROCESS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
"""They go to the worker itself, and all others to its process group, as torchrun sends them."""


def main() -> NoReturn:
    """Have the fork server start the worker, and end as it does; without a fork server become the worker."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = sys.argv[1:]
    path = os.environ.pop(SOCKET, "")  # A worker that runs torchrun itself has no use for it.
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
        match _ask(connection, StartRequest(tuple(arguments), Interpreter.current())):
            case Started(worker):
                _forward_signals(worker)
                status = _await_end(connection, worker)
            case Ended(status):  # Before it had begun.
                pass
            case Refused(reason):
                return reason
    sys.exit(_exit_code(status))


def _ask(connection: socket.socket, request: StartRequest) -> Reply:
    """Return the first reply, within ``START_TIMEOUT``. Without a reply, no worker runs."""
    message = request.encode()
    if len(message) > MAX_BYTES:
        return Refused(f"its arguments and environment take {len(message):,} bytes, more than {MAX_BYTES:,}")
    connection.settimeout(START_TIMEOUT)
    try:
        socket.send_fds(connection, [message], [0, 1, 2])
        message = connection.recv(MAX_BYTES)
    except TimeoutError:
        connection.shutdown(socket.SHUT_RD)  # From now on, no worker can say that it begins.
        message = connection.recv(MAX_BYTES)
        if not message:
            return Refused(f"the fork server was not ready within {START_TIMEOUT:g} s")
    except ConnectionError:
        message = b""
    except OSError as error:
        return Refused(f"the fork server cannot be asked: {error}")
    return decode_reply(message) if message else Refused(NO_SERVER)


def _forward_signals(worker: int) -> None:
    """Pass signals on to the worker from now on. Until now, they ended the launcher."""

    def forward(number: int, _frame: FrameType | None) -> None:
        _send(worker, number)

    for number in FORWARDED:
        signal.signal(number, forward)


def _send(worker: int, number: int) -> None:
    """Send a signal to a worker, if it has not ended."""
    with suppress(ProcessLookupError):
        if number in TO_PROCESS:
            os.kill(worker, number)
        else:
            os.killpg(worker, number)


def _await_end(connection: socket.socket, worker: int) -> int:
    """Return the status with which a worker has ended.

    Raises:
        SystemExit: the fork server has ended before it.
    """
    connection.settimeout(None)
    try:
        handle = os.pidfd_open(worker)
    except ProcessLookupError:
        handle = None
    try:
        message = connection.recv(MAX_BYTES)
    except ConnectionError:
        message = b""
    reply = decode_reply(message) if message else None
    if isinstance(reply, Ended):
        return reply.status
    _send(worker, signal.SIGKILL)
    if handle is not None:  # Its GPU and ports are free then, for the next worker.
        select.select([handle], [], [], END_TIMEOUT)
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
