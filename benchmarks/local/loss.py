"""How long a job does not train after it has lost a node with its disk: ``python -m benchmarks.local.loss``.

Four nodes of two ranks train and save, each rank a part of its own, 1 GiB together, and a spare stands by.
Then a node is killed with its agent, ranks and keeper, and its disk is wiped. Jobs: Muster with local
checkpoints, Muster on shared storage, and torchrun's ``c10d`` with ``dcp.async_save`` on the same storage.
Shared storage passes 100 MB/s for all ranks together, and counts what is read.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from benchmarks.measuring.machine import describe_machine
from benchmarks.processes import slow_bucket
from benchmarks.processes.local_rank import EVERY
from benchmarks.recovery import family, shown, wall
from lab.processes.coordinator import Coordinator, free_port
from muster.checkpoint.inventory import inventory_of

RANK = Path(__file__).parent.parent / "processes" / "local_rank.py"
NODES, PER_NODE = 4, 2
WORLD_SIZE = NODES * PER_NODE
PATIENCE = 300.0
"""Seconds until a job counts as hung."""


@dataclass
class Rank:
    """The moments of one process, on the monotonic clock."""

    started: float = 0.0
    loaded: tuple[float, float] = (0.0, 0.0)
    resumed: int = 0
    """The step."""
    steps: list[tuple[float, int]] = field(default_factory=list)


@dataclass
class Job:
    """Agents of torchrun on this machine, each with a disk of its own."""

    folder: Path
    kind: str
    endpoint: str
    size: int
    """Bytes of all parts."""
    agents: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def disk(self, number: int) -> Path:
        """Return the folder of a node's disk."""
        return self.folder / f"disk-{number}"

    def start(self) -> None:
        """Start an agent."""
        number = len(self.agents)
        backend = "c10d" if self.kind == "c10d" else "muster"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--rdzv-backend={backend}", "--rdzv-id=job"),
            *(f"--rdzv-endpoint={self.endpoint}", f"--nnodes={NODES}", f"--nproc-per-node={PER_NODE}"),
            *(f"--local-addr=127.0.0.{number + 1}", "--max-restarts=3", "--monitor-interval=0.1"),
            *(str(RANK), str(self.folder), self.kind, str(self.size // WORLD_SIZE), str(self.disk(number))),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MUSTER_NODE_NAME": f"node-{number}"}
        with (self.folder / f"agent-{number}.log").open("wb") as log:
            agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.agents.append(agent)

    def ranks(self, since: float = 0.0) -> list[Rank]:
        """Return the processes that started after a time."""
        found = []
        for path in self.folder.glob("rank-*"):
            rank, text = Rank(), path.read_text()
            for line in text[: text.rfind("\n") + 1].splitlines():
                what, *numbers = line.split()
                match what:
                    case "start":
                        rank.started = float(numbers[0])
                    case "loaded":
                        rank.loaded = float(numbers[0]), float(numbers[1])
                        rank.resumed = int(numbers[2])
                    case "step":
                        rank.steps.append((float(numbers[0]), int(numbers[1])))
            if rank.started > since:
                found.append(rank)
        return found

    def processes(self, number: int) -> list[psutil.Process]:
        """Return all processes of a node: its agent, its ranks, and its keeper."""
        found = family(self.agents[number].pid) if self.agents[number].poll() is None else []
        for path in self.disk(number).glob("*/keeper.json"):
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(json.loads(path.read_text())["pid"]))
        return found

    def lose(self, number: int) -> None:
        """Kill a node, and wipe its disk."""
        for process in self.processes(number):
            process.send_signal(signal.SIGKILL)
        shutil.rmtree(self.disk(number), ignore_errors=True)

    def end(self) -> None:
        """Kill all processes."""
        for number, agent in enumerate(self.agents):
            for process in self.processes(number):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            agent.wait()


@dataclass(frozen=True, slots=True)
class Recovery:
    """One loss; times in seconds after the fault. None: the job did not train again."""

    detected: float | None = None
    round: float | None = None
    started: float | None = None
    loading: float | None = None
    """How long the slowest rank took to load."""
    trained: float | None = None
    lost_steps: float | None = None
    read: int = 0
    """Bytes that were read from shared storage after the fault."""


def wait(job: Job, done: Callable[[], bool], lost: int | None = None) -> bool:
    """Wait for something. Returns False if the agents that live have ended, or hang."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if done():
            return True
        if all(one.poll() is not None for number, one in enumerate(job.agents) if number != lost):
            return False
        time.sleep(0.05)
    return False


def is_saved(job: Job, coordinator: Coordinator | None, step: int) -> bool:
    """Return whether a step is as safe as the job makes it."""
    folder = job.folder / "checkpoints"
    match job.kind:
        case "local":
            assert coordinator is not None
            said = f"step {step} is REPLICATED"
            return any(line.get("reason") == said for line in coordinator.log("checkpoint.level"))
        case "shared":
            return any(
                one.step == step for one in inventory_of(f"{slow_bucket.SCHEME}://{folder}").checkpoints()
            )
        case _:
            return (folder / str(step) / ".metadata").exists()


def recover(kind: str, size: int) -> Recovery:
    """Let a job lose a node once."""
    slow_bucket.reset()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        coordinator, endpoint = None, f"127.0.0.1:{free_port()}"
        if kind != "c10d":
            coordinator = stack.enter_context(Coordinator(folder, session_ttl=10.0, reset_grace=3.0))
            endpoint = coordinator.endpoint
        job = Job(folder, kind, endpoint, size)
        stack.callback(job.end)
        job.start()
        time.sleep(1.0)  # Its store, if there is one, is on the first node.
        for _ in range(NODES - 1):
            job.start()
        if not wait(job, lambda: len(job.ranks()) >= WORLD_SIZE):
            raise RuntimeError(f"{kind} does not train: {(folder / 'agent-0.log').read_text()[-2000:]}")
        job.start()  # The spare stands by.
        if not wait(job, lambda: is_saved(job, coordinator, 2 * EVERY)):
            raise RuntimeError(f"{kind} does not save: {(folder / 'agent-0.log').read_text()[-2000:]}")
        last = max(rank.steps[-1][1] for rank in job.ranks())
        read_before, _ = slow_bucket.transferred()
        at, at_wall = time.monotonic(), time.time()
        job.lose(NODES - 1)

        def trains() -> bool:
            ranks = job.ranks(at)
            return len([rank for rank in ranks if rank.steps]) >= WORLD_SIZE

        if not wait(job, trains, lost=NODES - 1):
            return Recovery()
        ranks = job.ranks(at)[-WORLD_SIZE:]
        gone, complete = (
            [wall(line) - at_wall for line in coordinator.log(event)] if coordinator is not None else []
            for event in ("node.gone", "round.completed")
        )
        return Recovery(
            gone[0] if gone else None,
            complete[-1] if complete else None,
            max(rank.started for rank in ranks) - at,
            max(rank.loaded[1] - rank.loaded[0] for rank in ranks),
            max(rank.steps[0][0] for rank in ranks) - at,
            last - min(rank.resumed for rank in ranks),
            slow_bucket.transferred()[0] - read_before,
        )


def main() -> None:
    """Run each case several times, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1024, help="of all parts together")
    kinds = ["local", "shared", "c10d"]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    arguments = parser.parse_args()
    print(describe_machine(Path(tempfile.gettempdir())))
    print(
        "| Job | Detected | Round complete | Ranks started | Load | First step | Steps lost | "
        "Read from shared storage | Died |"
    )
    print("|-|-|-|-|-|-|-|-|-|")
    for kind in arguments.kinds:
        found = [recover(kind, arguments.mib << 20) for _ in range(arguments.repeats)]
        steps = [one.lost_steps for one in found if one.lost_steps is not None]
        cells = [
            shown([one.detected for one in found]),
            shown([one.round for one in found]),
            shown([one.started for one in found]),
            shown([one.loading for one in found]),
            shown([one.trained for one in found]),
            f"{median(steps):.0f}" if steps else "–",
            f"{max(one.read for one in found) / 1e6:,.1f} MB",
            f"{sum(one.trained is None for one in found)} of {len(found)}",
        ]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
