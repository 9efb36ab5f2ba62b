"""Processes that begin with what takes long to import: forked from one that has imported it.

A rank that imports a framework takes seconds of a processor before it does anything, and the tests start
hundreds. Here one process does so for all, and stays without threads and without gRPC's state; what it forks
runs a module as ``python -m`` would.
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
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = 2
"""Nurseries of one process of pytest: each has the memory of what it has imported."""


class Forked:
    """A process that was forked; not a child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle: int | None = None
        with suppress(ProcessLookupError):  # It has ended already.
            self._handle = os.pidfd_open(pid)

    def kill(self) -> None:
        """SIGKILL it, if it still runs."""
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        if self._handle is None:
            return
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise TimeoutError(f"process {self.pid} runs on after {timeout} s")
        os.close(self._handle)
        self._handle = None


class Nursery:
    """A process that has imported modules, and forks others.

    Args:
        modules: what it has imported.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *modules],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fork(
        self, module: str, arguments: Sequence[str], environment: dict[str, str], out: Path, log: Path
    ) -> Forked:
        """Run a module.

        Args:
            module: its name.
            arguments: its own.
            environment: all of it.
            out: where its standard output goes.
            log: where its standard error goes.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps([module, list(arguments), environment, str(out), str(log)]),
            file=self._process.stdin,
            flush=True,
        )
        return Forked(int(self._process.stdout.readline()))

    def close(self) -> None:
        """End it; what it has forked runs on."""
        self._process.communicate()


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
    """Import, then fork for each line."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()  # Else each would look through all of it when it ends, and copy it by that.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for them here.
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _run(*json.loads(line))
            return
        print(pid, flush=True)


def _run(module: str, arguments: list[str], environment: dict[str, str], out: str, log: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for number, (path, how) in enumerate(((os.devnull, os.O_RDONLY), (out, flags), (log, flags))):
        handle = os.open(path, how, 0o644)
        os.dup2(handle, number)
        os.close(handle)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
