"""A real watcher process for tests: started, killed, stopped and asked for its metrics."""

from pathlib import Path
from typing import Self

from lab.patience import until
from lab.processes.coordinator import free_port
from lab.processes.daemon import HttpDaemon
from lab.processes.fork_client import MUSTER


class Watcher(HttpDaemon):
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

    def start(self) -> Self:
        """Start it, and wait until each source has answered."""
        self.launch()
        until(self._ready, "the watcher does not become ready")
        return self

    def launch(self) -> None:
        """Start it, and wait for nothing."""
        self._launch(*self._arguments)

    @property
    def log(self) -> str:
        """What it has logged."""
        return self.log_path.read_text()
