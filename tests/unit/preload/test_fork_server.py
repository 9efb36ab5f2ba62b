"""The order in which the fork server starts workers, without processes."""

import os
import socket
from collections.abc import Iterator

import pytest

from muster.preload.fork_server import Changes, ForkServer
from muster.preload.messages import Ended, ProcessContext, StartRequest, decode_reply

CONTEXT = ProcessContext("python", "/venv", "/job", (0,), {})
REQUEST = StartRequest(("-u", "train.py"), CONTEXT)


class Processes:
    """Stand-ins for forked processes: each ends when its pipe is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[int] = []
        self.killed: list[int] = []
        self._ends: dict[int, int] = {}
        monkeypatch.setattr(os, "fork", self._fork)
        monkeypatch.setattr(os, "pidfd_open", self._open)
        monkeypatch.setattr(os, "waitpid", lambda pid, options: (pid, 9))
        monkeypatch.setattr(os, "killpg", lambda pid, number: self.killed.append(pid))

    def _fork(self) -> int:
        self.started.append(1000 + len(self.started))
        return self.started[-1]

    def _open(self, pid: int) -> int:
        handle, self._ends[pid] = os.pipe()
        return handle

    def end(self, pid: int) -> None:
        os.close(self._ends.pop(pid))


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


class Server(ForkServer):
    """One step of it at a time."""

    def step(self) -> None:
        for key, _ in self._selector.select(0):
            assert self._handle(key.fileobj) is None


@pytest.fixture
def server(processes: Processes) -> Iterator[Server]:
    agent, ends = os.pipe()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # An abstract address of its own.
        listener.listen()
        yield Server(listener, agent, CONTEXT, Changes({}, frozenset()))
    os.close(agent)
    os.close(ends)


def launcher(server: Server) -> socket.socket:
    """Connect, and ask for a worker."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(server._listener.getsockname())
    null = os.open(os.devnull, os.O_RDWR)
    socket.send_fds(connection, [REQUEST.encode()], [null] * 3)
    os.close(null)
    server.step()
    server.step()
    return connection


def test_worker_waits_for_the_end_of_a_killed_one(server: Server, processes: Processes):
    """The next round's worker must not find its GPU and its ports taken."""
    with launcher(server):
        pass
    server.step()
    assert (processes.started, processes.killed) == ([1000], [1000])
    with launcher(server) as second:
        assert processes.started == [1000]
        processes.end(1000)
        server.step()
        assert processes.started == [1000, 1001]
        processes.end(1001)
        server.step()
        assert decode_reply(second.recv(1024)) == Ended(9)


def test_request_of_a_launcher_that_has_gone_is_dropped(server: Server, processes: Processes):
    with launcher(server):
        pass
    server.step()
    with launcher(server):
        pass
    server.step()
    processes.end(1000)
    server.step()
    assert processes.started == [1000]


def test_workers_of_living_launchers_do_not_wait_for_one_another(server: Server, processes: Processes):
    with launcher(server), launcher(server):
        assert processes.started == [1000, 1001]
        for pid in (1000, 1001):
            processes.end(pid)
        server.step()
