"""The ``muster`` command as a process, and a job for it to look at."""

import os
import queue
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

import grpc

from lab.patience import PATIENCE, until
from lab.processes import fork_client
from lab.processes.coordinator import MUSTER, Coordinator
from muster.v1 import barrier_pb2, barrier_pb2_grpc, common_pb2, session_pb2, session_pb2_grpc


@contextmanager
def job(coordinator: Coordinator, channel: grpc.Channel | None = None) -> Iterator["Job"]:
    """Run job1 of 4 ranks on 2 hosts: #0 is released, and #1 waits for rank 3."""
    with channel or grpc.insecure_channel(coordinator.endpoint) as channel:
        running = Job(channel)
        yield running
        running.close()


class Job:
    """One stream that speaks for all four ranks."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._barriers = barrier_pb2_grpc.BarrierServiceStub(channel)
        self._requests: queue.SimpleQueue[session_pb2.ConnectRequest | None] = queue.SimpleQueue()
        stub = session_pb2_grpc.SessionServiceStub(channel)
        self._responses = stub.Connect(iter(self._requests.get, None), timeout=10 * PATIENCE)
        processes = [
            session_pb2.Process(
                rank=rank,
                incarnation=f"life-{rank}",
                host=f"node-{rank // 2}",
                pid=4000 + rank,
                node_rank=rank // 2,
            )
            for rank in range(4)
        ]
        self._say(hello=session_pb2.Hello(run_id="job1", processes=processes, protocol_version=1))
        self._say(join_group=session_pb2.JoinGroup(prefix="checkpoint", world_size=4))
        self.arrive(0, range(4))
        assert self.decision().outcome == common_pb2.OUTCOME_RELEASED
        self.arrive(1, range(3))
        until(lambda: self.get().arrived == 3)

    def _say(self, **message: Any) -> None:
        self._requests.put(session_pb2.ConnectRequest(**message))

    def arrive(self, sequence: int, ranks: Iterable[int], timeout: float = 1800) -> None:
        arrivals = [session_pb2.Arrival(rank=rank) for rank in ranks]
        self._say(
            arrive=session_pb2.Arrive(
                prefix="checkpoint", sequence=sequence, timeout_ms=round(timeout * 1000), arrivals=arrivals
            )
        )

    def decision(self) -> common_pb2.Decision:
        """The next decision; the stream brings it once for all of its ranks."""
        return next(one.decision for one in self._responses if one.WhichOneof("message") == "decision")

    def close(self) -> None:
        """End the stream."""
        self._requests.put(None)

    def get(self) -> barrier_pb2.Barrier:
        request = barrier_pb2.BarrierServiceGetRequest(run_id="job1", prefix="checkpoint")
        return self._barriers.Get(request, timeout=PATIENCE).barrier


def environment(endpoint: str) -> dict[str, str]:
    return {**os.environ, "MUSTER_ENDPOINT": endpoint, "TERM": "xterm", "COLUMNS": "", "LINES": ""}


def muster(endpoint: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return fork_client.run([str(MUSTER), *arguments], env=environment(endpoint), timeout=PATIENCE)


def output(endpoint: str, *arguments: str) -> str:
    done = muster(endpoint, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


class Watching(subprocess.Popen[str]):
    """A command that is heard while it runs."""

    stdout: IO[str]
    stderr: IO[str]


@contextmanager
def watching(endpoint: str, *arguments: str) -> Iterator[Watching]:
    process = fork_client.popen(
        [str(MUSTER), *arguments],
        env=environment(endpoint),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield cast(Watching, process)
        finally:
            process.kill()


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Interrupt it; its exit code and what it said on stderr."""
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    return process.returncode, said
