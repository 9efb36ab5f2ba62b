"""A real coordinator process for tests: started, killed, stopped and started again on one port."""

import itertools
import json
import os
import random
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from lab.patience import PATIENCE, until
from lab.processes.daemon import Daemon
from lab.processes.fork_client import MUSTER as MUSTER

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


class Coordinator(Daemon):
    """``muster serve`` as a child process.

    Args:
        folder: where its log goes, and its database unless ``state`` is given.
        state: the storage; default: a SQLite file in ``folder``.
        session_ttl: seconds.
        reset_grace: seconds; the session TTL at most. By default, nobody who lives is too late for it.
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
        reset_grace: float = PATIENCE,
        extra: tuple[str, ...] = (),
        https: ssl.SSLContext | None = None,
        program: tuple[str, ...] = (str(MUSTER),),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder / "coordinator.log", program, environment)
        self._given_environment = environment
        self._reset_grace = reset_grace
        self.port = free_port()
        self.http_port = free_port()
        self.listens = f"127.0.0.1:{self.port}"
        self.endpoint = self.listens
        """Where workers and people reach it."""
        self.state = state or f"sqlite:///{folder / 'muster.db'}"
        self.session_ttl = session_ttl
        """Seconds, from the next start on."""
        self._extra = extra
        self._https = https

    def start(self) -> Self:
        """Start it, and wait until it serves."""
        self.begin()
        until(self._ready, "it does not become ready")
        return self

    def begin(self) -> None:
        """Start it, and wait for nothing."""
        # An earlier release knows no such option.
        grace = {"MUSTER_RESET_GRACE": str(self._reset_grace)}
        self._environment = {**(self._given_environment or os.environ), **grace}
        self._launch(
            "serve",
            f"--listen={self.listens}",
            f"--http=127.0.0.1:{self.http_port}",
            f"--state={self.state}",
            f"--session-ttl={self.session_ttl}",
            "--log-format=json",
            *self._extra,
        )

    def _ready(self) -> bool:
        self._check_runs()
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

    def logged(self, event: str, count: int = 1) -> list[dict[str, Any]]:
        """The lines of an event, of which there must soon be so many: the log is written aside."""
        until(lambda: len(self.log(event)) >= count, lambda: f"no {count} lines {event}: {self.log()}")
        return self.log(event)

    def log(self, event: str | None = None) -> list[dict[str, Any]]:
        """The lines of its log, or those of one event; but for one in whose midst it is, or was killed."""
        lines = []
        # It may also have been killed between a line and its end.
        for line in self.log_path.read_text().replace('}{"', '}\n{"').splitlines():
            with suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
        return [line for line in lines if event in (None, line["event"])]
