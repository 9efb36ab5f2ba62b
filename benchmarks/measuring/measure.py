"""One measurement: one system at one number of ranks, from starting its server to killing it."""

import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil

from benchmarks.peers import System
from benchmarks.peers.base import Load, LoadSpec, RoundTimes

STEP_TIMEOUT_S = 120.0
SETTLE_S = 0.3
MIN_ROUNDS = 20
MAX_ROUNDS = 20_000
ROOT = Path(__file__).resolve().parents[2]


class MeasurementError(Exception):
    """A measurement that could not be finished; its text is the reason that the report shows."""


@dataclass(frozen=True)
class Options:
    """What is the same for every measurement of a run."""

    seconds: float
    load_processes: int
    ranks_per_connection: int
    state_directory: Path


@dataclass(frozen=True)
class Sample:
    """The figures of one measurement."""

    rounds: int
    connections: int
    server_cpu_us_per_arrival: float
    load_cpu_us_per_arrival: float
    release_p50_ms: float
    release_p99_ms: float
    barrier_ms: float
    memory_per_rank_kib: float


def measure(system: System, ranks: int, options: Options) -> Sample:
    """Measure one system at one number of ranks; raises MeasurementError with the reason if it fails."""
    port = _free_port()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.state_directory)))
        server = stack.enter_context(_server(system, port, ranks, directory))
        processes = stack.enter_context(
            _load_processes(system.client_module, port, ranks, options, directory)
        )
        loads = _Loads(processes, server)
        try:
            return _measure(loads, server, ranks, options)
        except (MeasurementError, psutil.Error):
            # The ranks fail when the server does, and may be the first to tell.
            time.sleep(SETTLE_S)
            server.raise_if_ended()
            raise


def _measure(loads: "_Loads", server: "_Server", ranks: int, options: Options) -> Sample:
    loads.collect()
    server.wait_until_ready()
    time.sleep(SETTLE_S)
    memory_before = server.memory_bytes()

    loads.connect()
    loads.run(1)
    memory_after = server.memory_bytes()
    connections = server.connections()

    warm_up = loads.run(max(5, 1000 // ranks))
    rounds = round(options.seconds * 1000 / _cycle_ms(warm_up))
    rounds = min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)

    load_cpu_before = loads.cpu_seconds()
    server_cpu_before = server.cpu_seconds()
    times = loads.run(rounds)
    server_cpu = server.cpu_seconds() - server_cpu_before
    load_cpu = loads.cpu_seconds() - load_cpu_before

    waits_ms = [
        (release - arrival) / 1e6
        for arrival, release in zip(times.last_arrivals_ns, times.last_releases_ns, strict=True)
    ]
    return Sample(
        rounds=rounds,
        connections=connections,
        server_cpu_us_per_arrival=server_cpu * 1e6 / (rounds * ranks),
        load_cpu_us_per_arrival=load_cpu * 1e6 / (rounds * ranks),
        release_p50_ms=statistics.median(waits_ms),
        release_p99_ms=statistics.quantiles(waits_ms, n=100, method="inclusive")[98],
        barrier_ms=_cycle_ms(times),
        memory_per_rank_kib=(memory_after - memory_before) / 1024 / ranks,
    )


def _cycle_ms(times: RoundTimes) -> float:
    """Return the median time from one barrier's last release to the next one's."""
    return statistics.median((later - earlier) / 1e6 for earlier, later in pairwise(times.last_releases_ns))


class _Server:
    """The process of the system that is measured."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", port: int, log: Path, ready: Callable[[int], bool]
    ) -> None:
        self._process = process
        self._stats = psutil.Process(process.pid)
        self._port = port
        self._ready = ready
        self._log = log

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + STEP_TIMEOUT_S
        while time.monotonic() < deadline:
            self.raise_if_ended()
            if self._ready(self._port):
                return
            time.sleep(0.05)
        raise MeasurementError(f"the server was not ready within {STEP_TIMEOUT_S:.0f} s")

    def raise_if_ended(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise MeasurementError(f"the server ended, {_ending(code)}: {_last_line(self._log)}")

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._stats)

    def memory_bytes(self) -> int:
        return int(self._stats.memory_info().rss)

    def connections(self) -> int:
        return sum(
            connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == self._port
            for connection in self._stats.net_connections("tcp")
        )


@contextmanager
def _server(system: System, port: int, ranks: int, directory: Path) -> Iterator[_Server]:
    command = system.server_command(port, ranks, directory)
    if not Path(command[0]).exists():
        raise MeasurementError(f"there is no {Path(command[0]).name} command beside this Python")
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        yield _Server(process, port, log, system.ready)
    finally:
        process.kill()
        process.wait()


class _LoadProcess:
    """A process that plays some of the ranks, at the other end of a pipe."""

    def __init__(self, client_module: str, spec: LoadSpec, log: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_play_ranks, args=(client_module, spec, theirs, log), daemon=True
        )
        self._process.start()
        theirs.close()
        self._stats = psutil.Process(self._process.pid)
        self._log = log

    def receive(self) -> RoundTimes | None:
        try:
            answer = self.pipe.recv()
        except EOFError:
            self._process.join()
            ending = _ending(self._process.exitcode or 0)
            raise MeasurementError(f"a load process ended, {ending}: {_last_line(self._log)}") from None
        if isinstance(answer, MeasurementError):
            raise answer
        if answer is None or isinstance(answer, RoundTimes):
            return answer
        raise TypeError(f"unexpected answer {answer!r}")

    def cpu_seconds(self) -> float:
        return cpu_seconds(self._stats)

    def end(self) -> None:
        self._process.kill()
        self._process.join()


class _Loads:
    """All the load processes, commanded as one."""

    def __init__(self, processes: list[_LoadProcess], server: _Server) -> None:
        self._processes = processes
        self._server = server

    def connect(self) -> None:
        self._send("connect")
        self.collect()

    def run(self, rounds: int) -> RoundTimes:
        self._send(rounds)
        return RoundTimes.merge(answer for answer in self.collect() if answer is not None)

    def cpu_seconds(self) -> float:
        return sum(process.cpu_seconds() for process in self._processes)

    def collect(self) -> list[RoundTimes | None]:
        """Wait for every process's answer; the first failure to come in ends the measurement."""
        deadline = time.monotonic() + STEP_TIMEOUT_S
        answers: list[RoundTimes | None] = []
        waiting = {process.pipe: process for process in self._processes}
        while waiting:
            ready = wait(list(waiting), timeout=1.0)
            answers += [process.receive() for pipe, process in waiting.items() if pipe in ready]
            waiting = {pipe: process for pipe, process in waiting.items() if pipe not in ready}
            self._server.raise_if_ended()
            if time.monotonic() > deadline:
                raise MeasurementError(f"the ranks were not done within {STEP_TIMEOUT_S:.0f} s")
        return answers

    def _send(self, command: str | int) -> None:
        for process in self._processes:
            with suppress(BrokenPipeError):  # it has ended; collecting its answer tells how
                process.pipe.send(command)


@contextmanager
def _load_processes(
    client_module: str, port: int, world_size: int, options: Options, directory: Path
) -> Iterator[list[_LoadProcess]]:
    with ExitStack() as stack:
        loads = []
        for ranks in _shares(world_size, options.load_processes):
            spec = LoadSpec(port, ranks, world_size, options.ranks_per_connection)
            load = _LoadProcess(client_module, spec, directory / f"load-{ranks.start}.log")
            stack.callback(load.end)
            loads.append(load)
        yield loads


def _shares(world_size: int, processes: int) -> list[range]:
    bounds = [world_size * index // processes for index in range(processes + 1)]
    return [range(low, high) for low, high in pairwise(bounds) if low < high]


def _play_ranks(client_module: str, spec: LoadSpec, pipe: Connection, log: Path) -> None:
    """Run in a load process: import the client, then do what the pipe says until killed."""
    with log.open("wb") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    try:
        load: Load = import_module(client_module).open_load(spec)
        pipe.send(None)
        while True:
            command = pipe.recv()
            if command == "connect":
                load.connect()
                pipe.send(None)
            else:
                pipe.send(load.run(command))
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        pipe.send(MeasurementError(f"{type(error).__name__}: {_without_paths(lines[0])}"))


def cpu_seconds(process: psutil.Process) -> float:
    """The processor time that a process has used, its own and the kernel's for it.

    It is read from the process's CPU clock, which Linux numbers so (clock_getcpuclockid(3)): the times in
    /proc have steps of 10 ms.
    """
    return time.clock_gettime(~process.pid << 3 | 2)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return _without_paths(lines[-1]) if lines else "it printed nothing"


def _without_paths(text: str) -> str:
    """Shorten absolute paths to their last part: reports name no directory of a machine."""
    return re.sub(r"(?<![\w:/])/(?:[^\s/:'\"]+/)+", "", text)[:200]
