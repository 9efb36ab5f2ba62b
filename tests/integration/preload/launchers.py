"""A node with a fork server, on which programs start as torchrun starts them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from lab.patience import PATIENCE
from muster.preload.messages import FORWARDED, SOCKET_VARIABLE
from muster.worker.node.fork_server import ForkServerProcess

LAUNCHER = str(Path(sys.executable).with_name("muster-python"))
INHERITED = ("PATH", "HOME", "TMPDIR")
"""Nothing else: pytest changes variables between its phases."""


@dataclass(frozen=True, slots=True)
class Node:
    """Starts programs beside a fork server."""

    environment: Mapping[str, str]
    server: int = 0
    """The process of the fork server."""

    @contextmanager
    def start(
        self, *command: str, program: str = LAUNCHER, folder: Path | None = None, **variables: str
    ) -> "Iterator[subprocess.Popen[str]]":
        """Run a program with Python's arguments and further variables, in a session of its own."""
        with subprocess.Popen(
            [program, *command],
            env={**self.environment, **variables},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(
        self, *command: str, program: str = LAUNCHER, folder: Path | None = None, **variables: str
    ) -> tuple[int, str, str]:
        """Run a program until its end, and return its exit code, and what it wrote to output and error."""
        with self.start(*command, program=program, folder=folder, **variables) as process:
            output, error = process.communicate(timeout=PATIENCE)
        return process.returncode, output, error


@contextmanager
def node(*modules: str, **variables: str) -> Iterator[Node]:
    """Run a fork server that has imported modules, and give all processes further variables."""
    environment = {name: os.environ[name] for name in INHERITED if name in os.environ} | variables
    # As for torchrun: ``nohup`` and shells ignore some of them for what runs in the background.
    ignored = [number for number in FORWARDED if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    with patch.dict(os.environ, environment, clear=True):
        server = ForkServerProcess(modules or ("json",))
        environment[SOCKET_VARIABLE] = os.environ[SOCKET_VARIABLE]
    try:
        yield Node(environment, server.pid)
    finally:
        server.stop()
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
