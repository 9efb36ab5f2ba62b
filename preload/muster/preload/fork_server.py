"""The process that imports modules once, and forks a worker for each launcher that asks.

It has one thread. It ends when the agent has ended, and with it all workers that it has forked.
"""

import argparse
import ctypes
import gc
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from muster.preload import program
from muster.preload.imports import PreloadError, preload
from muster.preload.messages import (
    FORWARDED,
    MAX_BYTES,
    PER_WORKER,
    Command,
    Ended,
    ProcessContext,
    Refused,
    Reply,
    Started,
    StartRequest,
    encode_reply,
)

PR_SET_PDEATHSIG = 1
"""From include/uapi/linux/prctl.h."""


@dataclass(frozen=True, slots=True)
class _Worker:
    pid: int
    pidfd: int
    """Readable when it has ended."""
    connection: socket.socket


@dataclass(frozen=True, slots=True)
class Changes:
    """What the imports have changed in the environment. A worker would have changed it in the same way."""

    values: Mapping[str, str]
    removed: frozenset[str]

    @classmethod
    def between(cls, before: Mapping[str, str], after: Mapping[str, str]) -> Self:
        """Return the changes from one environment to another."""
        values = {name: value for name, value in after.items() if before.get(name) != value}
        return cls(values, frozenset(before.keys() - after.keys()))

    def apply(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return an environment with these changes."""
        return {name: value for name, value in environment.items() if name not in self.removed} | {
            name: value for name, value in self.values.items() if name not in PER_WORKER
        }


@dataclass(frozen=True, slots=True)
class _Launch:
    """What a forked worker has to do."""

    command: Command
    request: StartRequest
    files: list[int]
    connection: socket.socket
    changes: Changes
    server: int
    """The process of the fork server."""

    def run(self) -> None:
        _die_with_parent(self.server)
        os.setsid()  # torchrun's workers lead a session, too.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        try:
            # By the worker itself: as long as the launcher has not heard of it, it does not run.
            self.connection.send(encode_reply(Started(os.getpid())))
        except OSError:
            os._exit(1)  # The launcher has gone, or has become the worker.
        self.connection.close()
        program.become(self.changes.apply(self.request.context.environment), self.files)
        program.run(self.command)


class ForkServer:
    """Forks workers.

    Args:
        listener: launchers connect to it.
        agent: the agent's pidfd, readable when it has ended.
        context: what workers inherit.
        changes: what the imports have changed in their environment.
    """

    def __init__(
        self, listener: socket.socket, agent: int, context: ProcessContext, changes: Changes
    ) -> None:
        self._listener = listener
        self._agent: int | None = agent
        self._context = context
        self._changes = changes
        self._connections: set[socket.socket] = set()
        self._workers: dict[int, _Worker] = {}
        """By pidfd."""
        self._held: list[tuple[socket.socket, StartRequest, list[int]]] = []
        """Requests that wait for the end of killed workers: no rank may meet its own past."""
        self._selector = selectors.PollSelector()  # It has no file that forks would share.
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(agent, selectors.EVENT_READ)

    def serve(self) -> _Launch | None:
        """Serve until the agent and all workers have ended.

        Returns:
            In a forked worker, what to do. In the server itself None, at its end.
        """
        while self._agent is not None or self._workers:
            for key, _ in self._selector.select():
                launch = self._handle(key.fileobj)
                if launch is not None:
                    return launch
        return None

    def _handle(self, ready: object) -> _Launch | None:
        match ready:
            case int() if ready == self._agent:
                self._drop_agent(ready)
            case int() if ready in self._workers:
                return self._reap(self._workers[ready])
            case socket.socket() if ready is self._listener:
                connection, _ = self._listener.accept()
                self._connections.add(connection)
                self._selector.register(connection, selectors.EVENT_READ)
            case socket.socket() if ready in self._connections:
                return self._read(ready)
        return None

    def _drop_agent(self, pidfd: int) -> None:
        """Take no more launchers: they become their workers themselves."""
        self._selector.unregister(pidfd)
        self._selector.unregister(self._listener)
        os.close(pidfd)
        self._listener.close()
        self._agent = None

    def _read(self, connection: socket.socket) -> _Launch | None:
        try:
            message, files, _, _ = socket.recv_fds(connection, MAX_BYTES, program.STANDARD_FILES)
        except OSError:
            message, files = b"", []
        if message:
            try:
                request = StartRequest.decode(message)
                if len(files) != program.STANDARD_FILES:
                    raise ValueError("it has not the three standard files")
            except ValueError as error:
                _send(connection, Refused(f"the fork server cannot read its request: {error}"))
                _close_files(files)
            else:
                self._held.append((connection, request, files))
                return self._start_held()
        for worker in self._workers.values():
            if worker.connection is connection:  # SIGKILL has ended the launcher.
                _kill(worker)
        self._drop(connection)
        return None

    def _start_held(self) -> _Launch | None:
        """Start the workers of the requests that need not wait any more."""
        while self._held and all(one.connection in self._connections for one in self._workers.values()):
            connection, request, files = self._held.pop(0)
            if connection not in self._connections:  # The launcher has gone meanwhile.
                _close_files(files)
            elif launch := self._start(connection, request, files):
                return launch
        return None

    def _start(self, connection: socket.socket, request: StartRequest, files: list[int]) -> _Launch | None:
        """Fork the worker of a launcher, or refuse to."""
        command = Command.parse(request.command)
        if command is None:
            reply = Refused(f"Python's arguments are {' '.join(request.command)}")
        elif difference := self._context.difference(request.context):
            reply = Refused(difference)
        else:
            try:
                server = os.getpid()
                pid = os.fork()
            except OSError as error:
                reply = Refused(f"it cannot be forked: {error}")
            else:
                if pid == 0:
                    self._close_inherited(connection)
                    return _Launch(command, request, files, connection, self._changes, server)
                self._watch(_Worker(pid, os.pidfd_open(pid), connection))
                _close_files(files)
                return None
        _send(connection, reply)
        _close_files(files)
        self._drop(connection)
        return None

    def _watch(self, worker: _Worker) -> None:
        self._workers[worker.pidfd] = worker
        self._selector.register(worker.pidfd, selectors.EVENT_READ)

    def _reap(self, worker: _Worker) -> _Launch | None:
        _, status = os.waitpid(worker.pid, 0)
        del self._workers[worker.pidfd]
        self._selector.unregister(worker.pidfd)
        os.close(worker.pidfd)
        if worker.connection in self._connections:
            _send(worker.connection, Ended(status))
            self._drop(worker.connection)
        return self._start_held()

    def _drop(self, connection: socket.socket) -> None:
        self._connections.discard(connection)
        self._selector.unregister(connection)
        connection.close()

    def _close_inherited(self, connection: socket.socket) -> None:
        """Close in a forked worker what belongs to the server and to other workers."""
        self._listener.close()
        for pidfd in [*self._workers, *([] if self._agent is None else [self._agent])]:
            os.close(pidfd)
        for other in self._connections - {connection}:
            other.close()
        for _, _, files in self._held:
            _close_files(files)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends: nobody would see its end then."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _kill(worker: _Worker) -> None:
    with suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)


def _send(connection: socket.socket, reply: Reply) -> None:
    with suppress(OSError):  # The launcher has gone.
        connection.send(encode_reply(reply))


def _close_files(files: list[int]) -> None:
    for file in files:
        os.close(file)


def main() -> None:
    """Import, serve until the end, and in each forked worker run its program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listener", type=int, required=True, help="the number of the listening socket")
    parser.add_argument("--agent", type=int, required=True, help="the agent's process id")
    parser.add_argument("--modules", required=True, help="what is imported, with commas between")
    options = parser.parse_args()
    listener = socket.socket(fileno=options.listener)
    folder = Path(listener.getsockname()).parent
    launch = None
    try:
        agent = os.pidfd_open(options.agent)
        server = _prepared(listener, agent, options.modules.split(","))
        if server is not None:
            launch = server.serve()
    finally:
        if launch is None:
            shutil.rmtree(folder, ignore_errors=True)
    if launch is not None:
        launch.run()


def _prepared(listener: socket.socket, agent: int, modules: list[str]) -> ForkServer | None:
    """Import the modules, and return the server. Return None if no worker can be forked, and say why."""
    began = time.monotonic()
    context = ProcessContext.current()
    try:
        preload(modules, PER_WORKER)
    except (PreloadError, OSError) as error:
        print(f"muster-python: workers start without preloaded modules: {error}.", file=sys.stderr)
        return None
    # They are for the workers. Schedulers send some of them to all processes.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    # Collections leave the pages of frozen objects alone, so that workers share them.
    gc.collect()
    gc.freeze()
    print(
        f"muster-python: preloaded {', '.join(modules)} in {time.monotonic() - began:.1f} s.", file=sys.stderr
    )
    changes = Changes.between(context.environment, os.environ)
    return ForkServer(listener, agent, context, changes)
