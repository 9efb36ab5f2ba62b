"""The systems that are measured: how each server is started, and which module plays its ranks."""

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def listens(port: int) -> bool:
    """Whether anything listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@dataclass(frozen=True)
class System:
    """One system: its name for people, its server's command line and its client's module."""

    title: str
    server_command: Callable[[int, int, Path], list[str]]
    """Makes the command from a port, the number of ranks and a directory of its own."""
    client_module: str
    ready: Callable[[int], bool] = listens
    """Whether the server on a port takes ranks."""


def _muster(state: Callable[[Path], str]) -> Callable[[int, int, Path], list[str]]:
    def command(port: int, ranks: int, directory: Path) -> list[str]:
        return muster_command(port, state(directory))

    return command


def muster_command(port: int, state: str) -> list[str]:
    """A coordinator on a port, with its state somewhere."""
    executable = Path(sys.executable).with_name("muster")
    addresses = ["--listen", f"127.0.0.1:{port}", "--http", "127.0.0.1:0"]
    return [str(executable), "serve", *addresses, "--state", state]


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
