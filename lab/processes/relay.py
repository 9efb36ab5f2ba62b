"""A real relay process for tests: started, killed, stopped and woken, on one socket."""

import tempfile
from pathlib import Path
from typing import Any, Self

from lab.patience import until
from lab.processes.coordinator import Coordinator, free_port
from lab.processes.daemon import HttpDaemon
from lab.processes.fork_client import MUSTER


class Relay(HttpDaemon):
    """``muster relay`` as a child process.

    Args:
        folder: where its log goes.
        upstream: the coordinator's endpoint.
        listen: where it listens; default: a socket in a folder of its own, since pytest's are too long.
        extra: further arguments of ``muster relay``.
        program: the ``muster`` command.
        environment: its environment; default: this process's.
    """

    def __init__(
        self,
        folder: Path,
        upstream: str,
        *,
        listen: str = "",
        extra: tuple[str, ...] = (),
        program: tuple[str, ...] = (str(MUSTER),),
        environment: dict[str, str] | None = None,
    ) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="muster-relay-")
        self.listen = listen or f"unix://{self._own.name}/relay.sock"
        self.upstream = upstream
        self.endpoint = f"{self.listen},{upstream}"
        """For workers: the relay, and the coordinator if it does not answer."""
        self.http_port = free_port()
        super().__init__(folder / f"relay-{self.http_port}.log", program, environment)
        self._extra = extra

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._own.cleanup()

    def start(self) -> Self:
        """Start it, and wait until it listens."""
        self._launch(
            "relay",
            f"--listen={self.listen}",
            f"--upstream={self.upstream}",
            f"--http=127.0.0.1:{self.http_port}",
            *self._extra,
        )
        until(self._ready, "the relay does not become ready")
        return self


class RelayedCoordinator(Coordinator):
    """A coordinator that everyone reaches through a relay, as if the relay were it.

    Args:
        folder: where the logs go.
        more: as of :class:`Coordinator`.
    """

    def __init__(self, folder: Path, **more: Any) -> None:
        super().__init__(folder, **more)
        self.port = free_port()
        self.endpoint = f"127.0.0.1:{self.port}"
        self.relay = Relay(folder, self.listens, listen=self.endpoint)

    def __enter__(self) -> Self:
        self.start()
        self.relay.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.relay.__exit__()
        super().__exit__()
