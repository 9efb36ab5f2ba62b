"""How long a job does not train after it has lost a node: ``python -m benchmarks.recovery``.

Three nodes with a rank each train and save, and a spare stands by. Then a node dies (SIGKILL for its agent
and its rank) or falls silent (SIGSTOP). The time runs until all ranks of the next round have made a step.
Muster's coordinator has its default settings, but for the session TTL of nodes that fall silent. The peer is
torchrun's ``c10d`` with ``dcp.async_save``; its store is on a node that lives.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median

import psutil

from benchmarks.measuring.machine import describe_machine
from lab.processes.coordinator import Coordinator, free_port

RANK = Path(__file__).parent / "processes" / "elastic_rank.py"
NODES = 3
SILENT_TTL = 5.0
"""Seconds: the session TTL for nodes that fall silent."""
STEPS = 45
"""Steps before the fault: at least two saves have been made."""
PATIENCE = 150.0
"""Seconds until a job counts as hung."""


@dataclass
class Job:
    """Agents of torchrun on this machine."""

    folder: Path
    kind: str
    endpoint: str
    agents: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def start(self) -> None:
        """Start an agent."""
        number = len(self.agents) + 1
        command = [
            *(sys.executable, "-m", "torch.distributed.run", f"--rdzv-backend={self.kind}", "--rdzv-id=job"),
            *(f"--rdzv-endpoint={self.endpoint}", f"--nnodes={NODES}", "--nproc-per-node=1"),
            *(f"--local-addr=127.0.0.{number}", "--max-restarts=3", "--monitor-interval=0.1"),
            *(str(RANK), str(self.folder), self.kind),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MUSTER_NODE_NAME": f"node-{number}"}
        with (self.folder / f"agent-{number}.log").open("wb") as log:
            agent = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.agents.append(agent)

    def moments(self) -> dict[int, list[float]]:
        """Return what the ranks have left, by process id: their start, and each step."""
        found = {}
        for path in self.folder.glob("rank-*"):
            text = path.read_text()
            lines = text[: text.rfind("\n") + 1].split()
            found[int(path.name.removeprefix("rank-"))] = [float(line) for line in lines]
        return found

    def trained(self, since: float = 0.0, steps: int = 1) -> list[list[float]]:
        """Return the moments of ranks that started after a time, if all have made so many steps."""
        ranks = [moments for moments in self.moments().values() if moments and moments[0] > since]
        return ranks if len(ranks) >= NODES and all(len(one) > steps for one in ranks[-NODES:]) else []

    def lose(self, number: int, fault: signal.Signals) -> None:
        """Send a signal to an agent and its rank."""
        for process in family(self.agents[number].pid):
            process.send_signal(fault)

    def end(self) -> None:
        """Kill all processes."""
        for agent in self.agents:
            if agent.poll() is None:
                for process in family(agent.pid):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            agent.wait()


def family(pid: int) -> list[psutil.Process]:
    """Return an agent and all processes that it has started."""
    agent = psutil.Process(pid)
    return [agent, *agent.children(recursive=True)]


@dataclass(frozen=True, slots=True)
class Recovery:
    """One loss, in seconds after the fault; None: the job did not train again."""

    detected: float | None
    """The coordinator removed the node."""
    round: float | None
    """The next round was complete."""
    started: float | None
    """The last of its ranks ran its first line of the program, with all imports done."""
    trained: float | None
    """All had made a step."""
    died: float | None = None
    """All agents had ended."""


def wall(line: dict[str, str]) -> float:
    """Return the time of a line of the coordinator's log."""
    return datetime.fromisoformat(line["timestamp"]).timestamp()


@contextmanager
def jobs(kind: str, fault: signal.Signals) -> Iterator[tuple[Job, Coordinator | None]]:
    """Start a job, and what it needs."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        coordinator, endpoint = None, f"127.0.0.1:{free_port()}"
        if kind == "muster":
            ttl = SILENT_TTL if fault is signal.SIGSTOP else 10.0
            made = Coordinator(folder, session_ttl=ttl, reset_grace=3.0)
            coordinator = stack.enter_context(made)
            endpoint = coordinator.endpoint
        job = Job(folder, kind, endpoint)
        stack.callback(job.end)
        yield job, coordinator


def wait(job: Job, since: float, steps: int, lost: int | None = None) -> list[list[float]]:
    """Wait until all ranks of a round have made steps. Empty: the agents that live have ended, or hang."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if ranks := job.trained(since, steps):
            return ranks
        living = [one for number, one in enumerate(job.agents) if number != lost and one.poll() is None]
        if not living:
            break
        time.sleep(0.02)
    return []


def recover(kind: str, fault: signal.Signals) -> Recovery:
    """Let a job lose a node once."""
    with jobs(kind, fault) as (job, coordinator):
        job.start()
        time.sleep(1.0)  # Its store, if there is one, is on the first node.
        for _ in range(NODES - 1):
            job.start()
        if not wait(job, 0.0, STEPS):
            raise RuntimeError(f"{kind} does not train")
        job.start()
        time.sleep(10.0)  # The spare stands by.
        at, at_wall = time.monotonic(), time.time()
        job.lose(NODES - 1, fault)
        ranks = wait(job, at, 1, lost=NODES - 1)
        if not ranks:
            hung = time.monotonic() > at + PATIENCE
            return Recovery(None, None, None, None, None if hung else time.monotonic() - at)
        gone, complete = (
            [wall(line) - at_wall for line in coordinator.log(event)] if coordinator is not None else []
            for event in ("node.gone", "round.completed")
        )
        return Recovery(
            gone[0] if gone else None,
            complete[-1] if complete else None,
            max(one[0] for one in ranks) - at,
            max(one[1] for one in ranks) - at,
        )


def shown(values: Sequence[float | None], unit: str = "s", digits: int = 1) -> str:
    """Return a median and a range."""
    known = [value for value in values if value is not None]
    if not known:
        return "–"
    middle, lowest, highest = (f"{one:.{digits}f}" for one in (median(known), min(known), max(known)))
    return f"{middle} {unit} ({lowest} to {highest})"


def main() -> None:
    """Run each case several times, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", default=["muster", "c10d"], choices=["muster", "c10d"])
    parser.add_argument("--faults", nargs="+", default=["SIGKILL", "SIGSTOP"], choices=["SIGKILL", "SIGSTOP"])
    arguments = parser.parse_args()
    print(describe_machine(Path(tempfile.gettempdir())))
    print("| Fault | Job | Detected | Round complete | Ranks started | First step | Job died |")
    print("|-|-|-|-|-|-|-|")
    for fault in arguments.faults:
        for kind in arguments.kinds:
            found = [recover(kind, signal.Signals[fault]) for _ in range(arguments.repeats)]
            died = sum(one.trained is None for one in found)
            cells = [
                shown([one.detected for one in found]),
                shown([one.round for one in found]),
                shown([one.started for one in found]),
                shown([one.trained for one in found]),
                f"{died} of {len(found)}, after {shown([one.died for one in found])}" if died else "never",
            ]
            print(f"| {fault} | {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
