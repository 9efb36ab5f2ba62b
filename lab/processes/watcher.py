"""A real watcher process for tests: started, killed, stopped and asked for its metrics."""

import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from lab.patience import PATIENCE, until
from lab.processes.coordinator import free_port
from lab.processes.daemon import Daemon
from lab.processes.fork_client import MUSTER


class Watcher(Daemon):
    """``muster watch`` as a child process.

    Args:
        folder: where its log goes.
        endpoint: the coordinator's.
        node_name: the node that it watches.
        sources: names of its sources.
        extra: further arguments of ``muster watch``.
        environment: its environment; default: this process's.
    """

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        node_name: str,
        *sources: str,
        extra: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
    ) -> None:
        self.http_port = free_port()
        super().__init__(folder / f"watcher-{self.http_port}.log", (str(MUSTER),), environment)
        self._arguments = (
            "watch",
            f"--endpoint={endpoint}",
            f"--node={node_name}",
            *(f"--source={source}" for source in sources),
            f"--http=127.0.0.1:{self.http_port}",
            *extra,
        )

    def __enter__(self) -> "Watcher":
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.kill()

    def start(self) -> "Watcher":
        """Start it, and wait until each source has answered."""
        self.launch()
        until(self._ready, "the watcher does not become ready")
        return self

    def launch(self) -> None:
        """Start it, and wait for nothing."""
        self._launch(*self._arguments)

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

    @property
    def log(self) -> str:
        """What it has logged."""
        return self.log_path.read_text()
