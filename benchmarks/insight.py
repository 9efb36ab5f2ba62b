"""Measure insight: what it costs the coordinator to ask thousands of ranks, and a rank to note a step.

    python -m benchmarks.insight --ranks 4096

It prints a table. A barrier of another run goes on beside the question, once every few milliseconds.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil

from benchmarks.measuring.measure import cpu_seconds
from benchmarks.measuring.report import table
from lab.processes.coordinator import Coordinator
from muster.v1 import insight_pb2, insight_pb2_grpc
from muster.worker import GrpcBarrier, step

PROCESSES = 2
DIFFERENT = 12
REPEATS = 5
LONGEST_ANSWER_S = 60.0


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4096)
    ranks = parser.parse_args().ranks
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        coordinator = stack.enter_context(Coordinator(folder, state="memory:"))
        each = ranks // PROCESSES
        players = [
            stack.enter_context(
                _player(coordinator.port, number * each, each, DIFFERENT if number == 0 else 0)
            )
            for number in range(PROCESSES)
        ]
        for player in players:
            assert player.stdout is not None
            assert player.stdout.readline() == "welcomed\n"
        for player in players:
            stack.callback(player.kill)
        rows = _ask(coordinator, each * PROCESSES)
    print(table(["What", "Figure"], [*rows, ["step(n), median", f"{_step_ns():.0f} ns"]]))


def _player(port: int, first: int, count: int, different: int) -> "subprocess.Popen[str]":
    module = [sys.executable, "-m", "benchmarks.processes.insight_ranks"]
    command = [*module, *map(str, (port, first, count, different))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _ask(coordinator: Coordinator, ranks: int) -> list[list[str]]:
    server = psutil.Process(coordinator.pid)
    used, took, whole = [], [], 0
    options = [("grpc.max_receive_message_length", -1)]
    with (
        _Barriers(coordinator.endpoint) as beside,
        grpc.insecure_channel(coordinator.endpoint, options) as channel,
    ):
        stub = insight_pb2_grpc.InsightServiceStub(channel)
        for _ in range(REPEATS):
            before, began = cpu_seconds(server), time.monotonic()
            answer = stub.Stacks(insight_pb2.StacksRequest(run_id="insight"), timeout=LONGEST_ANSWER_S)
            took.append(time.monotonic() - began)
            used.append(cpu_seconds(server) - before)
            whole = answer.ByteSize()
            assert sorted(len(crowd.members) for crowd in answer.crowds) == [1] * DIFFERENT + [
                ranks - DIFFERENT
            ], json.dumps([len(crowd.members) for crowd in answer.crowds] + [len(answer.silent)])
        quiet, busy = beside.waits(took)
    return [
        [f"ranks asked; of them at another place: {DIFFERENT}", f"{ranks:,}"],
        ["coordinator's processor time for one question, median", f"{statistics.median(used):.2f} s"],
        ["answered after, median", f"{statistics.median(took):.2f} s"],
        ["size of the answer", f"{whole / 2**20:.1f} MiB"],
        ["a barrier of another run, median without a question", f"{quiet:.1f} ms"],
        ["the slowest barrier of that run beside the questions", f"{busy:.0f} ms"],
    ]


class _Barriers:
    """A run of one rank that passes barriers one after the other, on a thread."""

    def __init__(self, endpoint: str) -> None:
        self._barrier = GrpcBarrier(0, 1, "beside", endpoint, run_id="beside")
        self._seconds: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._pass)

    def __enter__(self) -> "_Barriers":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _pass(self) -> None:
        while not self._stop.wait(0.005):
            began = time.monotonic()
            self._barrier.execute_barrier()
            self._seconds.append(time.monotonic() - began)

    def waits(self, beside: list[float]) -> tuple[float, float]:
        """Milliseconds: the median in quiet, and the longest of all."""
        longest = max(self._seconds)
        self._seconds.clear()
        time.sleep(min(5.0, sum(beside)))
        return statistics.median(self._seconds) * 1000, longest * 1000


def _step_ns() -> float:
    """Return the time of one call, as the median of many rounds."""
    count = 10_000
    rounds = timeit.repeat(lambda: step(7), number=count, repeat=50)
    return statistics.median(rounds) / count * 1e9


if __name__ == "__main__":
    main()
