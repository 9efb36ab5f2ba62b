"""One measurement: one system at one number of ranks, from starting its server to killing it."""

import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers import SYSTEMS, System
from benchmarks.peers.base import LoadSpec, RoundTimes

STEP_TIMEOUT_S = 90.0
SETTLE_S = 0.3
MIN_ROUNDS = 20
MAX_ROUNDS = 20_000
ROOT = Path(__file__).resolve().parent.parent


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


def measure(system_name: str, ranks: int, options: Options) -> Sample:
    """Measure one system at one number of ranks; raises MeasurementError with the reason if it fails."""
    system = SYSTEMS[system_name]
    port = _free_port()
    with ExitStack() as stack:
        loads = stack.enter_context(_load_processes(system_name, port, ranks, options))
        server = stack.enter_context(_server(system, port, ranks, options.state_directory))
        _collect(loads)
        time.sleep(SETTLE_S)
        memory_before = server.memory_info().rss

        _command(loads, "connect")
        _command(loads, 1)
        memory_after = server.memory_info().rss
        connections = _established(server, port)

        warm_up = _merged(_command(loads, max(5, 1000 // ranks)))
        rounds = round(options.seconds * 1000 / _cycle_ms(warm_up))
        rounds = min(max(rounds, MIN_ROUNDS), MAX_ROUNDS)

        load_stats = [psutil.Process(load.process.pid) for load in loads]
        load_cpu_before = sum(_cpu_seconds(stats) for stats in load_stats)
        server_cpu_before = _cpu_seconds(server)
        times = _merged(_command(loads, rounds))
        server_cpu = _cpu_seconds(server) - server_cpu_before
        load_cpu = sum(_cpu_seconds(stats) for stats in load_stats) - load_cpu_before

    waits_ms = sorted(
        (release - arrival) / 1e6
        for arrival, release in zip(times.last_arrivals_ns, times.last_releases_ns, strict=True)
    )
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
    releases = times.last_releases_ns
    return statistics.median(
        (later - earlier) / 1e6 for earlier, later in zip(releases, releases[1:], strict=False)
    )


# --- the server ---


@contextmanager
def _server(system: System, port: int, ranks: int, state_directory: Path) -> Iterator[psutil.Process]:
    with tempfile.TemporaryDirectory(dir=state_directory) as name:
        directory = Path(name)
        log_path = directory / "server.log"
        command = system.server_command(port, ranks, directory)
        if not Path(command[0]).exists():
            raise MeasurementError(f"no {Path(command[0]).name} command beside this Python")
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            _wait_until_listening(process, port, log_path)
            yield psutil.Process(process.pid)
        finally:
            process.kill()
            process.wait()


def _wait_until_listening(process: "subprocess.Popen[bytes]", port: int, log_path: Path) -> None:
    deadline = time.monotonic() + STEP_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            lines = log_path.read_text(errors="replace").strip().splitlines()
            last_line = _without_paths(lines[-1]) if lines else "it printed nothing"
            raise MeasurementError(f"the server ended at its start, {_ending(process.returncode)}: {last_line}")
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise MeasurementError(f"the server did not listen within {STEP_TIMEOUT_S:.0f} s")


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _established(server: psutil.Process, port: int) -> int:
    return sum(
        connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == port
        for connection in server.net_connections("tcp")
    )


# --- the load processes ---


@dataclass(frozen=True)
class _LoadProcess:
    process: Any  # a multiprocessing.Process of the spawn context
    pipe: Connection


@contextmanager
def _load_processes(
    system_name: str, port: int, world_size: int, options: Options
) -> Iterator[list[_LoadProcess]]:
    context = multiprocessing.get_context("spawn")
    loads: list[_LoadProcess] = []
    try:
        for ranks in _shares(world_size, options.load_processes):
            spec = LoadSpec(port, ranks, world_size, options.ranks_per_connection)
            ours, theirs = context.Pipe()
            process = context.Process(target=_play_ranks, args=(system_name, spec, theirs), daemon=True)
            process.start()
            theirs.close()
            loads.append(_LoadProcess(process, ours))
        yield loads
    finally:
        for load in loads:
            load.process.kill()
        for load in loads:
            load.process.join()


def _shares(world_size: int, processes: int) -> list[range]:
    bounds = [world_size * index // processes for index in range(processes + 1)]
    return [range(low, high) for low, high in zip(bounds, bounds[1:], strict=False) if low < high]


def _play_ranks(system_name: str, spec: LoadSpec, pipe: Connection) -> None:
    """Run in a load process: import the client, then do what the pipe says until killed."""
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    try:
        load = SYSTEMS[system_name].open_load(spec)
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


def _command(loads: list[_LoadProcess], command: str | int) -> list[RoundTimes | None]:
    for load in loads:
        load.pipe.send(command)
    return _collect(loads)


def _collect(loads: list[_LoadProcess]) -> list[RoundTimes | None]:
    """Wait for every load process's answer; the first failure to come in ends the measurement."""
    deadline = time.monotonic() + STEP_TIMEOUT_S
    answers: dict[int, RoundTimes | None] = {}
    while len(answers) < len(loads):
        waiting = {load.pipe: index for index, load in enumerate(loads) if index not in answers}
        ready = multiprocessing.connection.wait(list(waiting), deadline - time.monotonic())
        if not ready:
            raise MeasurementError(f"the ranks were not done within {STEP_TIMEOUT_S:.0f} s")
        for pipe in ready:
            index = waiting[pipe]
            answers[index] = _receive(loads[index])
    return [answers[index] for index in range(len(loads))]


def _receive(load: _LoadProcess) -> RoundTimes | None:
    try:
        answer = load.pipe.recv()
    except EOFError:
        load.process.join()
        raise MeasurementError(f"a load process ended, {_ending(load.process.exitcode)}") from None
    if isinstance(answer, MeasurementError):
        raise answer
    return answer


def _merged(answers: list[RoundTimes | None]) -> RoundTimes:
    return RoundTimes.merge(answer for answer in answers if answer is not None)


# --- helpers ---


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ending(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"


def _without_paths(text: str) -> str:
    """Shorten absolute paths to their last part: reports name no directory of a machine."""
    return re.sub(r"(?<![\w:/])/(?:[^\s/:'\"]+/)+", "", text)[:200]
