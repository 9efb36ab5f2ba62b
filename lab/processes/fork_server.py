"""The process that imports, and then forks programs for :mod:`lab.processes.fork_client`.

It has no threads. ``python -m lab.processes.fork_server FD MODULE …``
"""

import atexit
import fcntl
import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from lab.processes.fork_client import MOST, ForkServer, spawning

LONGEST_NAME = 15
"""Bytes of a process's name (TASK_COMM_LEN of include/linux/sched.h, less one)."""


def aside() -> ForkServer:
    """Set a process aside that forks what this one has imported by now: before it has threads."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        control.close()
        serve(theirs)
    theirs.close()
    return ForkServer(control)


def serve(control: socket.socket) -> NoReturn:
    """Fork a program for each request, until nobody can ask any more."""
    while True:
        request, files, _, _ = socket.recv_fds(control, MOST, 16)
        if not request:
            os._exit(0)
        answer, tells = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:  # Then it is the child of the process that asks.
                os.sched_yield()
            os.close(answer)
            control.close()
            _play(partial(_begin, tells, files, *json.loads(request)))
        os.close(tells)
        os.waitpid(between, 0)
        control.send(os.read(answer, MOST))
        for file in (answer, *files):
            os.close(file)


def _play(program: Callable[[], None]) -> NoReturn:
    """Run a program, and end as Python does; how, the last handler of the exit is to know."""
    global _status
    try:
        _call(program)
    except SystemExit as end:
        _status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    _status = 0
    sys.exit()


def _call(program: Callable[[], None]) -> None:
    try:
        program()
    except Exception as error:
        # As Python does: what the error holds lives until the end, and the hook may raise SystemExit.
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


_status: int | None = None


def _leave() -> None:
    """End without taking all modules down, which takes a process with torch a quarter of a second."""
    if _status is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status & 0xFF)


def _let_go() -> None:
    """Leave what was imported as it is at the end: torch would take its operators down one by one."""
    for one in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        one.atexit = False


def _begin(
    tells: int,
    files: Sequence[int],
    command: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    numbers: Sequence[int],
    session: bool,
    spawns: bool,
) -> None:
    if session:
        os.setsid()
    # Not before it has a session: who starts it may signal its group at once.
    os.write(tells, str(os.getpid()).encode())
    os.close(tells)
    # First out of the way, for one may have the number that another is to get.
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    random.seed()
    tempfile.tempdir = None  # It is where the environment says, and not where it was looked for before.
    if spawns:
        with spawning(aside()):
            _run(command)
    else:
        _run(command)


def _run(command: Sequence[str]) -> None:
    """As Python does."""
    unbuffered = command[0] == "-u"
    # Those of the process that imported know of its files whether they can be sought in.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", 1 if os.isatty(1) else -1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    if unbuffered:
        command = command[1:]
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(write_through=True)
    kind, *rest = command
    name = rest[0].rpartition(".")[2] if kind == "-m" else Path(kind).stem
    # Its command line is still that of the process that imported; here it can be told from others.
    Path("/proc/self/comm").write_text(name[:LONGEST_NAME])
    if kind == "-m":
        sys.argv[1:] = rest[1:]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[:] = [kind, *rest[1:]]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.argv[:] = command
        sys.path[0] = str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


def main() -> None:
    """Import; then fork for each request."""
    atexit.register(_leave)  # The first that is registered is the last that is run.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # The first caller may have blocked some.
    for module in sys.argv[2:]:
        importlib.import_module(module)
    _let_go()
    gc.freeze()  # Else each would look through all of it when it ends, and copy it by that.
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    from lab.processes import fork_server as itself  # What it forks finds it under this name.

    itself.main()
