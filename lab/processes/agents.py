"""Real torchrun agents on this machine, and the program that their workers run."""

import contextlib
import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from lab.patience import PATIENCE, until
from lab.processes.fork_client import TORCH
from lab.processes.torchrun import torchrun

PROGRAM = '''
"""Reduce a number over all workers again and again, until a file tells to finish; then pass a barrier."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from muster.worker import GrpcBarrier

folder = Path(sys.argv[1])
dist.init_process_group("gloo", timeout=timedelta(seconds=30))
barrier = GrpcBarrier(barrier_prefix="checkpoint", timeout_secs=60)
born = folder / f"born-{os.getpid()}"
born.write_text(f"{os.environ['MUSTER_ROUND']} {dist.get_rank()} {dist.get_world_size()} {os.getppid()}")
born.rename(folder / f"worker-{os.getpid()}")
finished = 0
while not finished:
    wish = torch.tensor([int((folder / "finish").exists())])
    dist.all_reduce(wish, dist.ReduceOp.MAX)
    finished = int(wish)
    time.sleep(0.02)
barrier.execute_barrier()
print("rank", dist.get_rank(), "finished", flush=True)
'''

CONF = {
    "join_timeout": 30,
    "last_call_timeout": 1,
    "close_timeout": 5,
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 1,
    "read_timeout": 10,
}
"""torch's settings, shortened."""
CLOCK_ERROR = 1.0
"""Seconds: the kernel tells the machine's start, from which a process's is counted, in whole seconds."""


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that has come through to its process group."""

    pid: int
    round: int
    rank: int
    world_size: int
    agent: int
    seen_at: float
    """Seconds since 1970 when it had come through. A process with its number that began later is another."""


class Job:
    """The agents and workers of one run, in one folder.

    Args:
        folder: where the workers leave their traces.
        endpoint: the coordinator's.
        run_id: the run.
        program: what the workers run, with the folder as its argument.
        command: what torchrun is to run instead, with its arguments. Its workers must leave the same trace.
        imports: what that imports.
        ranks: of each agent.
        restarts: how often an agent may start its workers again because one of them failed.
    """

    def __init__(
        self,
        folder: Path,
        endpoint: str,
        run_id: str = "job",
        program: str = PROGRAM,
        *,
        command: tuple[str, ...] = (),
        imports: tuple[str, ...] = TORCH,
        ranks: int = 1,
        restarts: int = 5,
    ) -> None:
        self.folder = folder
        self.endpoint = endpoint
        self.run_id = run_id
        self.ranks = ranks
        self.restarts = restarts
        self.imports = imports
        self.command = command or (str(folder / "program.py"), str(folder))
        if not command:
            Path(self.command[0]).write_text(program)
        self.agents: list[Agent] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            agent.kill()
        for worker in self.workers():
            _kill(worker)

    def agent(
        self, nnodes: str, *, endpoint: str = "", address: str = "127.0.0.1", node: str = "", **conf: int
    ) -> "Agent":
        """Start one more torchrun, on the node of this name and address."""
        name = f"agent-{len(self.agents)}"
        agent = Agent(self, name, nnodes, endpoint or self.endpoint, address, node, CONF | conf)
        self.agents.append(agent)
        return agent

    def workers(self) -> list[Worker]:
        """All that ever came through, by round and rank."""
        found = []
        for path in self.folder.glob("worker-*"):
            round, rank, size, agent = (int(part) for part in path.read_text().split())
            pid = int(path.name.removeprefix("worker-"))
            found.append(Worker(pid, round, rank, size, agent, path.stat().st_mtime))
        return sorted(found, key=lambda worker: (worker.round, worker.rank))

    def round(self, size: int, *, after: int = -1) -> list[Worker]:
        """Wait for a round of so many workers, with a number above ``after``."""
        until(lambda: self._came_together(size, after), lambda: f"no round of {size}:\n{self.said()}")
        return self._came_together(size, after)

    def _came_together(self, size: int, after: int) -> list[Worker]:
        workers = self.workers()
        for number in {worker.round for worker in workers if worker.round > after}:
            members = [worker for worker in workers if worker.round == number]
            if len(members) == size == members[0].world_size:
                return members
        return []

    def trace(self, pattern: str, count: int, *, patience: float = PATIENCE) -> None:
        """Wait until the workers have left so many files of a name."""
        until(
            lambda: len(list(self.folder.glob(pattern))) >= count,
            lambda: f"no {count} {pattern}:\n{self.said()}",
            patience=patience,
        )

    def finish(self) -> None:
        """Let the workers end."""
        (self.folder / "finish").touch()

    def said(self) -> str:
        """What all agents said, for a failed test."""
        return "\n".join(f"--- {agent.name}\n{agent.said()}" for agent in self.agents)


class Agent:
    """One torchrun with its workers."""

    def __init__(
        self, job: Job, name: str, nnodes: str, endpoint: str, address: str, node: str, conf: dict[str, int]
    ) -> None:
        self.name = name
        self.address = address
        self.node = node
        """The name of its node; empty: that of this machine."""
        self._job = job
        self._log = job.folder / f"{name}.log"
        with self._log.open("wb") as log:
            self.process = torchrun(
                [
                    *("--rdzv-backend=muster", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job.run_id}"),
                    f"--rdzv-conf={','.join(f'{key}={value}' for key, value in conf.items())}",
                    *(f"--nnodes={nnodes}", f"--nproc-per-node={job.ranks}", f"--local-addr={address}"),
                    *(f"--max-restarts={job.restarts}", "--monitor-interval=0.1"),
                    *job.command,
                ],
                os.environ | {"MUSTER_ENDPOINT": "", "OMP_NUM_THREADS": "1", "MUSTER_NODE_NAME": node},
                log,
                job.imports,
            )

    def said(self) -> str:
        """Its output, with its workers'."""
        return self._log.read_text()

    def wait(self) -> int:
        """Its exit code."""
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end:\n{self._job.said()}") from None

    def terminate(self) -> int:
        """SIGTERM: a graceful end. Returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        """SIGKILL for the agent and its workers, as when a machine dies."""
        self.process.kill()
        self.process.wait()
        for worker in self._job.workers():
            if worker.agent == self.process.pid:
                _kill(worker)


def _kill(worker: Worker) -> None:
    """SIGKILL a worker, if it lives. Numbers are given again within minutes on a machine that runs tests."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(worker.pid)
        if process.create_time() < worker.seen_at + CLOCK_ERROR:
            process.kill()
