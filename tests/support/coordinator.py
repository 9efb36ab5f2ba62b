"""A real coordinator process for tests: started, killed, stopped and started again on one port."""

import itertools
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.support.patience import PATIENCE, until

MUSTER = Path(sys.executable).with_name("muster")


SHARE = 1_400
"""Ports of each of pytest's workers, of which there are 16 at most; no other takes one of them."""
FIRST_PORT = 10_000
"""All are below those that Linux gives to outgoing connections."""


def _own_ports() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw15").removeprefix("gw")) % 16
    own = range(FIRST_PORT + worker * SHARE, FIRST_PORT + (worker + 1) * SHARE)
    begin = random.SystemRandom().randrange(SHARE)
    return itertools.cycle([*own[begin:], *own[:begin]])


_ports = _own_ports()


def free_port() -> int:
    """A port that nobody listens on now, and that no connection or other test takes by itself."""
    for port in _ports:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there is no port left")


class Coordinator:
    """``muster serve`` as a child process.

    Args:
        folder: where its log goes, and its database unless ``state`` is given.
        state: the storage; default: a SQLite file in ``folder``.
        session_ttl: seconds.
        extra: further arguments of ``muster serve``.
        https: for asking its HTTP port, if that speaks TLS.
        program: the ``muster`` command.
        environment: its environment; default: this process's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        state: str | None = None,
        session_ttl: float = 10.0,
        extra: tuple[str, ...] = (),
        https: ssl.SSLContext | None = None,
        program: tuple[str, ...] = (str(MUSTER),),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.http_port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self.state = state or f"sqlite:///{folder / 'muster.db'}"
        self.log_path = folder / "coordinator.log"
        self._session_ttl = session_ttl
        self._extra = extra
        self._https = https
        self._program = program
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "Coordinator":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> "Coordinator":
        """Start it, and wait until it serves."""
        self.begin()
        until(self._ready, "it does not become ready")
        return self

    def begin(self) -> None:
        """Start it, and wait for nothing."""
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *self._program,
                    "serve",
                    f"--listen={self.endpoint}",
                    f"--http=127.0.0.1:{self.http_port}",
                    f"--state={self.state}",
                    f"--session-ttl={self._session_ttl}",
                    "--log-format=json",
                    *self._extra,
                ],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env=self._environment,
            )

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"it ended at once:\n{self.log_path.read_text()}"
        try:
            return self.get("/readyz")[0] == 200
        except OSError:
            return False

    def get(
        self,
        path: str,
        *,
        https: ssl.SSLContext | None = None,
        authorization: str = "",
        timeout: float = PATIENCE,
    ) -> tuple[int, str]:
        """Status and text of an HTTP path."""
        context = https or self._https
        url = f"{'https' if context else 'http'}://127.0.0.1:{self.http_port}{path}"
        request = urllib.request.Request(url)
        if authorization:
            request.add_header("Authorization", authorization)
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=context) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def advertise(self, endpoint: str) -> None:
        """Say from the next start on that workers reach it there."""
        self._extra = (*self._extra, f"--advertise={endpoint}")

    @property
    def runs(self) -> bool:
        """Whether it was started, and neither killed nor stopped, and has not ended by itself."""
        return self._process is not None and self._process.poll() is None

    def reap(self) -> None:
        """See whether it has ended by itself; then it may be started again."""
        if self._process is not None and self._process.poll() is not None:
            self._process = None

    def ended(self) -> int:
        """Wait until it ends by itself.

        Returns:
            The exit code.
        """
        assert self._process is not None
        return self._process.wait(timeout=PATIENCE)

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> int:
        """SIGTERM, and wait for the end.

        Returns:
            The exit code.
        """
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGTERM)
        code = self._process.wait(timeout=PATIENCE)
        self._process = None
        return code

    def logged(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """The lines of an event, of which there must soon be so many: the log is written aside."""
        until(lambda: len(self.log(event)) >= count, lambda: f"no {count} lines {event}: {self.log()}")
        return self.log(event)

    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        """The lines of its log, or those of one event."""
        lines = [json.loads(line) for line in self.log_path.read_text().splitlines()]
        return [line for line in lines if event in (None, line["event"])]
