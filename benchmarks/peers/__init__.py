"""The systems that are measured: how each server is started, and which module plays its ranks."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import cast

from benchmarks.peers.base import Load, LoadSpec


@dataclass(frozen=True)
class System:
    """One system: its name for people, its server's command line and its client's module."""

    title: str
    server_command: Callable[[int, int, Path], list[str]]
    client_module: str

    def open_load(self, spec: LoadSpec) -> Load:
        """Return this system's ranks, not connected yet; imports the client, so only for load processes."""
        return cast("Load", import_module(self.client_module).open_load(spec))


def _muster(state: Callable[[Path], str]) -> Callable[[int, int, Path], list[str]]:
    executable = Path(sys.executable).with_name("muster")

    def command(port: int, ranks: int, directory: Path) -> list[str]:
        addresses = ["--listen", f"127.0.0.1:{port}", "--http", "127.0.0.1:0"]
        return [str(executable), "serve", *addresses, "--state", state(directory)]

    return command


def _module(name: str) -> Callable[[int, int, Path], list[str]]:
    def command(port: int, ranks: int, directory: Path) -> list[str]:
        return [sys.executable, "-m", name, str(port), str(ranks)]

    return command


SYSTEMS = {
    "muster-memory": System("Muster, memory", _muster(lambda _: "memory:"), "benchmarks.peers.muster"),
    "muster-sqlite": System(
        "Muster, SQLite",
        _muster(lambda directory: f"sqlite:///{directory / 'muster.db'}"),
        "benchmarks.peers.muster",
    ),
    "tcpstore": System("TCPStore", _module("benchmarks.peers.tcpstore"), "benchmarks.peers.tcpstore"),
    "jax": System(
        "JAX coordination service", _module("benchmarks.peers.jax_service"), "benchmarks.peers.jax_service"
    ),
}
