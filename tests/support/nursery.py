"""Processes that begin with what takes long to import: forked from one that has imported it.

A rank that imports a framework takes seconds of a processor before it does anything, a coordinator most of
one, and the tests start hundreds of each. Here one process imports, for all; it has no threads and nothing of
gRPC's state but its code. What it forks runs a module as ``python -m`` would.
"""

import atexit
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = 3
"""Nurseries of one process of pytest: each has the memory of what it has imported."""
MOST = 100_000
"""Bytes of a request: its environment, above all."""
forks = False
"""Whether tests have ``muster`` and torchrun forked, too. Who measures starts what users start."""


class Ending:
    """A process that ends, with what :class:`subprocess.Popen` has for that.

    Args:
        name: for people.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Returns:
            Its exit code; of a signal, its number below 0.
        """
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self._name, timeout or 0.0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        """Wait for its end for some seconds; returns its exit code, or None."""
        raise NotImplementedError


class Forked(Ending):
    """A process that a nursery has forked."""

    def __init__(self, name: str, report: int) -> None:
        super().__init__(name)
        self._report = Connection(report, writable=False)
        self.pid: int = self._report.recv()

    def kill(self) -> None:
        """SIGKILL it, if it still runs."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM it, if it still runs."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def _ended(self, timeout: float | None) -> int | None:
        if self._code is None and self._report.poll(timeout):
            self._code = self._report.recv()
            self._report.close()
        return self._code


class Nursery:
    """A process that has imported modules, and forks others.

    Args:
        modules: what it has imported.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), *modules],
                cwd=ROOT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
                pass_fds=[theirs.fileno()],
            )

    def fork(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str], out: int, log: int
    ) -> Forked:
        """Run a module.

        Args:
            module: its name.
            arguments: its own.
            environment: all of it.
            out: the file descriptor of its standard output.
            log: that of its standard error.
        """
        request = json.dumps([module, list(arguments), dict(environment), str(Path.cwd())]).encode()
        ours, report = os.pipe()
        try:
            socket.send_fds(self._control, [request], [report, out, log])
        finally:
            os.close(report)
        return Forked(module, ours)

    def close(self) -> None:
        """End it; what it has forked runs on, and nobody says how it ends."""
        self._control.close()
        self._process.wait()


_kept: dict[tuple[str, ...], Nursery] = {}
"""The one that was used last comes last."""


def nursery(*modules: str) -> Nursery:
    """The nursery of modules."""
    found = _kept.pop(modules, None) or Nursery(modules)
    _kept[modules] = found
    if len(_kept) > KEPT:
        _kept.pop(next(iter(_kept))).close()
    return found


@atexit.register
def _close_all() -> None:
    while _kept:
        _kept.popitem()[1].close()


# ---------------------------------------------------------------------- the process


def main() -> None:
    """Import; then fork for each request, and say how each ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # Else each would look through all of it when it ends, and copy it by that.
    children: dict[int, tuple[int, Connection]] = {}
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for handle, _ in poll.poll():
            if handle in children:
                pid, report = children.pop(handle)
                poll.unregister(handle)
                os.close(handle)
                _say(report, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                report.close()
                continue
            request, handed, _, _ = socket.recv_fds(control, MOST, 3)
            if not request:
                return
            report, files = Connection(handed[0], readable=False), handed[1:]
            pid = os.fork()
            if pid == 0:
                for other, (_, theirs) in children.items():
                    os.close(other)
                    theirs.close()
                report.close()
                control.close()
                _run(*json.loads(request), *files)
                return
            for file in files:
                os.close(file)
            _say(report, pid)
            children[os.pidfd_open(pid)] = pid, report
            poll.register(next(reversed(children)), select.POLLIN)


def _say(report: Connection, number: int) -> None:
    with suppress(BrokenPipeError):  # Whoever asked for it may have gone.
        report.send(number)


def _run(module: str, arguments: list[str], environment: dict[str, str], folder: str, *files: int) -> None:
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    settle(environment, folder, files)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def settle(environment: Mapping[str, str], folder: str, files: Sequence[int]) -> None:
    """Be a process of one's own after a fork.

    Args:
        environment: all of it.
        folder: to be in.
        files: file descriptors for standard output and standard error.
    """
    for number, handle in enumerate(files, 1):
        os.dup2(handle, number)
        os.close(handle)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    random.seed()


if __name__ == "__main__":
    main()
