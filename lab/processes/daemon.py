"""A ``muster`` that runs as a child process until it is killed or told to stop."""

import os
import signal
import subprocess
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from lab.patience import PATIENCE
from lab.processes import fork_client


class Daemon:
    """A child process that can be started again.

    Args:
        log_path: where its log goes.
        program: the ``muster`` command.
        environment: its environment; default: this process's.
    """

    def __init__(
        self, log_path: Path, program: tuple[str, ...], environment: Mapping[str, str] | None
    ) -> None:
        self.log_path = log_path
        self._program = program
        self._environment = environment
        self._process: subprocess.Popen[Any] | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> Self:
        """Start it, and wait until it serves."""
        raise NotImplementedError

    def _launch(self, *arguments: str) -> None:
        with self.log_path.open("ab") as log:
            command, none, env = [*self._program, *arguments], subprocess.DEVNULL, self._environment
            if "-c" in self._program:  # It is another release's.
                self._process = subprocess.Popen(command, stdin=none, stdout=log, stderr=log, env=env)
                return
            self._process = fork_client.popen(
                command, imports=fork_client.COMMAND, stdin=none, stdout=log, stderr=log, env=env
            )

    def _check_runs(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, f"it ended at once:\n{self.log_path.read_text()}"

    @property
    def runs(self) -> bool:
        """Whether it was started, and neither killed nor stopped, and has not ended by itself."""
        return self._process is not None and self._process.poll() is None

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

    def restart(self) -> None:
        """SIGKILL it, and start it again."""
        self.kill()
        self.start()

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


class HttpDaemon(Daemon):
    """A daemon with an HTTP port."""

    http_port: int

    def _ready(self) -> bool:
        self._check_runs()
        with suppress(OSError):
            return bool(self.get("/readyz"))
        return False

    def get(self, path: str) -> str:
        """The text of an HTTP path."""
        url = f"http://127.0.0.1:{self.http_port}{path}"
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            return str(response.read().decode())

    def metric(self, name: str) -> float:
        """The value of one of its metrics, with its labels as Prometheus writes them."""
        for line in self.get("/metrics").splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
        raise AssertionError(f"there is no metric {name}")
