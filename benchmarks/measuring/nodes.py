"""The nodes of a job on this machine: agents of torchrun, each with a disk of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

PRELOADED = "-preloaded"
"""Suffix of a job's kind: ``muster-python`` starts its ranks."""


def _exit(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ``timeout`` sends it twice.
    sys.exit(128 + signal.SIGTERM)


@dataclass
class Nodes:
    """The agents of one job.

    They end with the block, also if the benchmark gets SIGTERM (as by ``timeout``).
    """

    folder: Path
    backend: str
    """Rendezvous backend."""
    endpoint: str
    count: int
    """Nodes that the job has."""
    per_node: int
    """Ranks of a node."""
    program: Callable[[Path], list[str]]
    """Returns what an agent runs, given its disk."""
    preload: bool = False
    """Whether workers start preloaded: ``PYTHON_EXEC=muster-python``."""
    patience: float = 300.0
    """Seconds until the job counts as hung."""
    agents: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def __enter__(self) -> Self:
        signal.signal(signal.SIGTERM, _exit)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def disk(self, number: int) -> Path:
        """Return the folder of a node's disk."""
        return self.folder / f"disk-{number}"

    def start(self) -> None:
        """Start an agent."""
        number = len(self.agents)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--rdzv-backend={self.backend}"),
            *("--rdzv-id=job", f"--rdzv-endpoint={self.endpoint}", f"--nnodes={self.count}"),
            *(f"--nproc-per-node={self.per_node}", f"--local-addr=127.0.0.{number + 1}"),
            *("--max-restarts=3", "--monitor-interval=0.1"),
            *self.program(self.disk(number)),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MUSTER_NODE_NAME": f"node-{number}"}
        if self.preload:
            environment["PYTHON_EXEC"] = str(Path(sys.executable).with_name("muster-python"))
        with (self.folder / f"agent-{number}.log").open("wb") as log:
            agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.agents.append(agent)

    def send(self, number: int, fault: signal.Signals) -> None:
        """Send a signal to all processes of a node."""
        for process in self.processes(number):
            process.send_signal(fault)

    def processes(self, number: int) -> list[psutil.Process]:
        """Return all processes of a node: its agent, its ranks, and its keeper."""
        found = []
        if self.agents[number].poll() is None:
            agent = psutil.Process(self.agents[number].pid)
            found = [agent, *agent.children(recursive=True)]
        for path in self.disk(number).glob("*/keeper.json"):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(json.loads(path.read_text())["pid"]))
        return found

    def lose(self, number: int) -> None:
        """Kill a node, and wipe its disk."""
        self.send(number, signal.SIGKILL)
        shutil.rmtree(self.disk(number), ignore_errors=True)

    def end(self) -> None:
        """Kill all processes. A second call does nothing: others may have their numbers by then."""
        for number, agent in enumerate(self.agents):
            for process in self.processes(number):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            agent.wait()
        self.agents.clear()

    def wait(self, done: Callable[[], bool], lost: int | None = None) -> bool:
        """Wait for something.

        Returns:
            Whether it came: False if the agents that live have ended, or hang.
        """
        end = time.monotonic() + self.patience
        while time.monotonic() < end:
            if done():
                return True
            if all(one.poll() is not None for number, one in enumerate(self.agents) if number != lost):
                return False
            time.sleep(0.05)
        return False

    def last_words(self) -> str:
        """Return the end of the first agent's log."""
        return (self.folder / "agent-0.log").read_text()[-2000:]
