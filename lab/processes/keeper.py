"""A real keeper process for tests: started, killed, stopped, and asked over HTTP as its ranks ask it."""

import http.client
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from lab.patience import PATIENCE, until
from lab.processes import fork_client
from lab.processes.daemon import Daemon
from muster.checkpoint.committed import run_mark

IMPORTS = ("muster.keeper.process", "muster.keeper.__main__", "grpc._channel")
"""What the process imports."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a keeper answered."""

    status: int
    body: bytes

    @property
    def said(self) -> Any:
        return json.loads(self.body)


class Keeper(Daemon):
    """``python -m muster.keeper`` as a child process.

    Args:
        folder: the local folder of its node.
        endpoint: the coordinator's.
        run_id: the run.
        extra: further arguments.
        environment: its environment; default: this process's.
    """

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        run_id: str = "job",
        *extra: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder / f"muster-{run_mark(run_id)}"
        super().__init__(folder / "keeper.log", (sys.executable, "-m", "muster.keeper"), environment)
        self._arguments = (
            f"--folder={folder}",
            f"--endpoint={endpoint}",
            f"--run-id={run_id}",
            "--listen=127.0.0.1:0",
            "--advertise=127.0.0.1",
            *extra,
        )

    def start(self) -> Self:
        """Start it, and wait until it serves."""
        (self.folder / "keeper.json").unlink(missing_ok=True)
        self.launch()
        until(self._announced, lambda: f"the keeper does not start:\n{self.log}")
        return self

    def launch(self) -> None:
        """Start it, and wait for nothing."""
        with self.log_path.open("ab") as log:
            self._process = fork_client.popen(
                [*self._program, *self._arguments],
                imports=IMPORTS,
                stdout=log,
                stderr=log,
                env=self._environment,
            )

    def _announced(self) -> bool:
        self._check_runs()
        return (self.folder / "keeper.json").exists()

    @property
    def address(self) -> dict[str, Any]:
        """What ``keeper.json`` says."""
        said: dict[str, Any] = json.loads((self.folder / "keeper.json").read_text())
        return said

    @property
    def id(self) -> str:
        """Its id."""
        return (self.folder / "keeper.id").read_text()

    @property
    def log(self) -> str:
        """What it has logged."""
        return self.log_path.read_text()

    def logged(self, text: str) -> None:
        """Wait until it has logged something."""
        until(lambda: text in self.log, lambda: f"it did not log {text!r}:\n{self.log}")

    def post(self, path: str, **said: object) -> Answer:
        """Ask it as a rank does."""
        address = self.address
        return ask(address["url"], "POST", path, address["token"], json.dumps(said).encode())

    def get(self, path: str, **headers: str) -> Answer:
        """Ask it as a rank does."""
        address = self.address
        return ask(address["url"], "GET", path, address["token"], headers=headers)

    def attach(self, generation: int, world_size: int, rank: int, replicas: int = 1) -> None:
        """Attach a rank; repeat it as a rank does until the coordinator has heard of it."""
        fields = {"generation": generation, "world_size": world_size, "rank": rank, "replicas": replicas}

        def attached() -> bool:
            with suppress(OSError):
                return self.post("/attach", **fields).status == 200
            return False

        until(attached, lambda: f"it does not attach:\n{self.log}")


def ask(
    url: str,
    method: str,
    path: str,
    token: str = "",
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send an HTTP request whose path is sent as it is."""
    split = urlsplit(url)
    connection = http.client.HTTPConnection(split.hostname or "", split.port, timeout=PATIENCE)
    try:
        shown = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request(method, path, body, {**shown, **(headers or {})})
        response = connection.getresponse()
        return Answer(response.status, response.read())
    finally:
        connection.close()
