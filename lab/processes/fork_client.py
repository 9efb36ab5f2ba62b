"""Start Python programs by a fork of a process that has already imported their packages.

A rank spends seconds of CPU on imports of its framework, a coordinator most of a second, and the tests start
hundreds of each. One fork server imports for all. It has no threads, and of gRPC only the code. A forked
program runs as Python would run it, and is a child of the process that asked for it.
"""

import atexit
import ctypes
import inspect
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MUSTER = Path(sys.executable).with_name("muster")
SERVER = "lab.processes.fork_server"
"""Module of the process that forks."""
TORCH = (
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.multiprocessing.subprocess_handler",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "muster.worker",
    "muster.worker.saves",
    "grpc._channel",
)
"""What ranks import, and torchrun; DTensor does so at its first use, and gRPC."""
COMMAND = (
    "muster.service.cli.main",
    "muster.service.cli.serving.serve",
    "muster.service.app",
    "muster.relay",
    "typer._adapters",
    "pydantic.main",
    "uvloop",
    "grpc._channel",
)
"""What the command imports, typer at its first use."""
KEPT = 4
"""Fork servers of one pytest process; each holds the memory of its imports."""
MOST = 100_000
"""Bytes of a request: its environment, above all."""
PR_SET_CHILD_SUBREAPER = 36
"""From include/uapi/linux/prctl.h."""
forks = False
"""Whether :func:`popen` and torchrun fork. Benchmarks leave it off, to measure what users start."""


def popen(
    command: Sequence[str], *, imports: Sequence[str] = TORCH, spawns: bool = False, **options: Any
) -> "subprocess.Popen[Any]":
    """Start a Python program, or the command ``muster``: where tests fork, from what has imported already.

    Args:
        command: begins with ``sys.executable``, or :data:`MUSTER`.
        imports: what the program imports.
        spawns: whether the processes that it spawns are to be forked, too.
        options: of :class:`subprocess.Popen`: its files, ``env``, ``cwd``, ``text``, ``start_new_session``.
            What is forked has no standard input unless one is given.
    """
    if not forks:
        return subprocess.Popen(command, **options)
    if command[0] == str(MUSTER):
        command, imports = [sys.executable, "-m", "lab.processes.muster_command", *command[1:]], COMMAND
    return Forked(fork_server(*imports), command, spawns=spawns, **options)


def run(command: Sequence[str], *, timeout: float, **options: Any) -> "subprocess.CompletedProcess[str]":
    """As :func:`subprocess.run` does it; text, from pipes unless others are given."""
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    with popen(command, text=True, **given) as process:
        try:
            out, log = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, log)


class ForkServer:
    """A process that forks programs.

    Args:
        control: to a process that serves, a descendant of this one.
    """

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def fork(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        files: Mapping[int, int],
        *,
        folder: str = "",
        session: bool = False,
        spawns: bool = False,
    ) -> int:
        """Start a program.

        Args:
            command: as Python's command line has it, without Python.
            environment: all of it.
            files: what it has open: this process's file descriptors by their numbers there.
            folder: where it is to be; default: where this process is.
            session: whether it begins a session of its own.
            spawns: whether the processes that it spawns are to be forked, too.

        Returns:
            Its process id: it is a child of this process.
        """
        request = [
            list(command),
            dict(environment),
            folder or str(Path.cwd()),
            list(files),
            session,
            spawns,
        ]
        text = json.dumps(request).encode()
        assert len(text) <= MOST, f"{len(text)} bytes are more than it reads: {command}"
        with _adopting():
            socket.send_fds(self._control, [text], list(files.values()))
            pid = self._control.recv(MOST)
        assert pid, f"what is to fork {command} has ended, and has said why"
        return int(pid)

    def close(self) -> None:
        """End it; what it has forked runs on."""
        # Others that this process has forked may hold it, too.
        self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()


class Forked(subprocess.Popen[Any]):
    """A program that is forked rather than executed."""

    def __init__(
        self, server: ForkServer, command: Sequence[str], *, spawns: bool = False, **options: Any
    ) -> None:
        self._server = server
        self._spawns = spawns
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:  # as CPython's, which is called by position alone
        named = dict(zip(_EXECUTE_CHILD, (self, *given), strict=True))
        pipes = {name: named[name] for name in _EXECUTE_CHILD if name.endswith(("read", "write"))}
        with Path(os.devnull).open() as nothing:
            theirs = (pipes["p2cread"], nothing.fileno()), (pipes["c2pwrite"], 1), (pipes["errwrite"], 2)
            self.pid = self._server.fork(
                named["args"][1:],
                os.environ if named["env"] is None else named["env"],
                {
                    number: otherwise if file == -1 else file
                    for number, (file, otherwise) in enumerate(theirs)
                },
                folder=str(named["cwd"] or ""),
                session=named["start_new_session"],
                spawns=self._spawns,
            )
        self._child_created = True
        self._close_pipe_fds(**pipes)  # type: ignore[attr-defined]


_EXECUTE_CHILD = tuple(inspect.signature(vars(subprocess.Popen)["_execute_child"]).parameters)


@contextmanager
def spawning(by: ForkServer | None = None) -> Iterator[None]:
    """Processes that :mod:`multiprocessing` spawns meanwhile are forked; by default from :data:`TORCH`."""
    from multiprocessing import util  # Its handler of the exit is to be run before ours.

    execute = util.spawnv_passfds

    def spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if "--multiprocessing-fork" not in args:
            return execute(path, args, passfds)  # It is multiprocessing's tracker of resources.
        command = args[args.index("-c") :]  # Without what this interpreter was told.
        # Not kept here: others may take its place meanwhile.
        return (by or fork_server(*TORCH)).fork(
            command, os.environ, {file: file for file in (1, 2, *passfds)}
        )

    util.spawnv_passfds = spawn
    try:
        yield
    finally:
        util.spawnv_passfds = execute


@contextmanager
def _adopting() -> Iterator[None]:
    """Make this process the parent of descendants that lose theirs."""
    libc = ctypes.CDLL(None, use_errno=True)
    with _adoptions:
        assert libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, os.strerror(ctypes.get_errno())
        try:
            yield
        finally:
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_adoptions = threading.Lock()


# ---------------------------------------------------------------------- those of this process

_kept: dict[tuple[str, ...], tuple[ForkServer, "subprocess.Popen[bytes]"]] = {}
"""The one that was used last comes last."""


def fork_server(*modules: str) -> ForkServer:
    """Return the fork server that has imported these modules."""
    found = _kept.pop(modules, None) or _begun(modules)
    _kept[modules] = found
    if len(_kept) > KEPT:
        _end(next(iter(_kept)))
    return found[0]


def _begun(modules: Sequence[str]) -> tuple[ForkServer, "subprocess.Popen[bytes]"]:
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", SERVER, str(theirs.fileno()), *modules],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
            pass_fds=[theirs.fileno()],
        )
    return ForkServer(control), process


def _end(modules: tuple[str, ...]) -> None:
    server, process = _kept.pop(modules)
    server.close()
    process.wait()


@atexit.register
def _end_all() -> None:
    for modules in list(_kept):
        _end(modules)
