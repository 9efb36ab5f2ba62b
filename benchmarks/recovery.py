"""How long a job does not train after it has lost a node: ``python -m benchmarks.recovery``.

Three nodes with a rank each train and save, and a spare stands by. Then a node dies (SIGKILL for its agent
and its rank) or falls silent (SIGSTOP). The time runs until all ranks of the next round have made a step.
Muster's coordinator has its default settings, but for the session TTL of nodes that fall silent. Muster runs
with and without preloaded workers. The peer is torchrun's ``c10d`` with ``dcp.async_save``; its store is on
a node that lives.
"""

import argparse
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.nodes import PRELOADED, Nodes
from lab.processes.coordinator import Coordinator, free_port

RANK = Path(__file__).parent / "processes" / "elastic_rank.py"
KINDS = ["muster", f"muster{PRELOADED}", "c10d"]
NODES = 3
SILENT_TTL = 5.0
"""Seconds: the session TTL for nodes that fall silent."""
STEPS = 45
"""Steps before the fault: at least two saves have been made."""
PATIENCE = 150.0
"""Seconds until a job counts as hung."""


def trained(folder: Path, since: float = 0.0, steps: int = 1) -> list[list[float]]:
    """Return the moments of ranks that started after a time, if all have made so many steps.

    The first moment of a rank is its start; each other one is a step.
    """
    ranks = []
    for path in folder.glob("rank-*"):
        text = path.read_text()
        moments = [float(line) for line in text[: text.rfind("\n") + 1].split()]
        if moments and moments[0] > since:
            ranks.append(moments)
    return ranks if len(ranks) >= NODES and all(len(one) > steps for one in ranks[-NODES:]) else []


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
def jobs(name: str, fault: signal.Signals) -> Iterator[tuple[Nodes, Coordinator | None]]:
    """Start a job, and what it needs."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kind = name.removesuffix(PRELOADED)
        coordinator, endpoint = None, f"127.0.0.1:{free_port()}"
        if kind == "muster":
            ttl = SILENT_TTL if fault is signal.SIGSTOP else 10.0
            made = Coordinator(folder, session_ttl=ttl, reset_grace=3.0)
            coordinator = stack.enter_context(made)
            endpoint = coordinator.endpoint
        program = [str(RANK), str(folder), kind]
        nodes = stack.enter_context(
            Nodes(
                folder, kind, endpoint, NODES, 1, lambda _: program, preload=kind != name, patience=PATIENCE
            )
        )
        yield nodes, coordinator


def recover(kind: str, fault: signal.Signals) -> Recovery:
    """Let a job lose a node once."""
    with jobs(kind, fault) as (nodes, coordinator):
        nodes.start()
        time.sleep(1.0)  # Its store, if there is one, is on the first node.
        for _ in range(NODES - 1):
            nodes.start()
        if not nodes.wait(lambda: bool(trained(nodes.folder, steps=STEPS))):
            raise RuntimeError(f"{kind} does not train: {nodes.last_words()}")
        nodes.start()
        time.sleep(10.0)  # The spare stands by.
        at, at_wall = time.monotonic(), time.time()
        nodes.send(NODES - 1, fault)
        if not nodes.wait(lambda: bool(trained(nodes.folder, at)), lost=NODES - 1):
            hung = time.monotonic() > at + PATIENCE
            return Recovery(None, None, None, None, None if hung else time.monotonic() - at)
        ranks = trained(nodes.folder, at)
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
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
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
