"""torchrun whose workers are forked from what it had imported when it began, as it was itself.

A process that has neither threads nor anything of gRPC's is set aside first, for an agent has both when it
starts its workers. They are the agent's own children all the same.
"""

import ctypes
import json
import os
import runpy
import select
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, handlers

from tests.support.nursery import MOST, Ending, settle

PYTHON = (sys.executable, "-u")
"""How torchrun begins the command of a Python program."""
PR_SET_CHILD_SUBREAPER = 36
"""Of include/uapi/linux/prctl.h."""
LONGEST_NAME = 15
"""Bytes of a process's name (TASK_COMM_LEN of include/linux/sched.h, less one)."""


class Worker(Ending):
    """A child process of the agent."""

    def __init__(self, pid: int) -> None:
        super().__init__("worker")
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def _ended(self, timeout: float | None) -> int | None:
        if self._code is None and select.select([self._handle], [], [], timeout)[0]:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._handle)
        return self._code


class Forking(SubprocessHandler):
    """Has the process that was set aside fork the worker, if that is a Python program."""

    aside: socket.socket

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:  # as torch's
        if args[:2] != PYTHON:
            return super()._popen(args, env)
        files = [file.fileno() if file else number for number, file in ((1, self._stdout), (2, self._stderr))]
        with _adopting():
            socket.send_fds(self.aside, [json.dumps([args[2:], env, str(Path.cwd())]).encode()], files)
            return Worker(int(self.aside.recv(MOST)))


@contextmanager
def _adopting() -> Iterator[None]:
    """Whose parent has ended becomes a child of this process, if it descends from it."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _fork_for(agent: socket.socket) -> None:
    """Fork workers until the agent has ended; a worker runs its program and returns."""
    while True:
        request, files, _, _ = socket.recv_fds(agent, MOST, 2)
        if not request:
            return
        told, tells = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            os.setsid()  # The agent signals a group.
            os.write(tells, str(os.getpid()).encode())
            os.close(told)
            os.close(tells)
            agent.close()
            command, environment, folder = json.loads(request)
            _run(command, environment, folder, files)
            return
        os.waitpid(between, 0)
        agent.send(os.read(told, MOST))
        for file in (told, tells, *files):
            os.close(file)


def _run(command: Sequence[str], environment: Mapping[str, str], folder: str, files: Sequence[int]) -> None:
    settle(environment, folder, files)
    # Its command line is still that of the process that imported; here it can be told from others.
    Path("/proc/self/comm").write_text(Path(command[0]).stem[:LONGEST_NAME])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if command[0] == "-m":
        sys.argv[1:] = command[2:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = command
        sys.path[0] = str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")


def main() -> None:
    """Set a process aside, and run torchrun."""
    Forking.aside, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        Forking.aside.close()
        _fork_for(theirs)
        return
    theirs.close()
    handlers.SubprocessHandler = Forking  # type: ignore[attr-defined]
    runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
