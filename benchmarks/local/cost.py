"""What copies on another node cost the training thread: ``python -m benchmarks.local.cost``.

Two nodes of one rank train, and save 1 GiB together to their nodes, with and without copies on the other
node. Measured: how long a save stops the training thread; and how fast training is while parts are written,
and in the 2 s after that, in which the copies are made. The latter are beside the speed while no save is
under way.
"""

import argparse
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.nodes import Nodes
from benchmarks.recovery import shown, wall
from lab.processes.coordinator import Coordinator

RANK = Path(__file__).parent.parent / "processes" / "copied_rank.py"
NODES = 2
QUIET = 3.0
"""Seconds before a save that count as training alone."""
AFTER = 2.0
"""Seconds after a save in which copies are made."""

Span = tuple[float, float]


@dataclass
class Rank:
    """What one rank has left; times on the wall clock."""

    steps: list[float] = field(default_factory=list)
    began: dict[int, float] = field(default_factory=dict)
    """By step: when its save began."""
    saved: dict[int, Span] = field(default_factory=dict)
    """By step: when its save was finalized, and the seconds for which it stopped training."""

    def speed(self, during: Span) -> float | None:
        """Return the steps a second in a span; None if it is too short to say."""
        within = [at for at in self.steps if during[0] <= at <= during[1]]
        return (len(within) - 1) / (within[-1] - within[0]) if len(within) >= 5 else None


def read(path: Path) -> Rank:
    """Read what a rank has left by now."""
    rank, text = Rank(), path.read_text()
    for line in text[: text.rfind("\n") + 1].splitlines():
        match line.split():
            case "step", at:
                rank.steps.append(float(at))
            case "save", at, step:
                rank.began[int(step)] = float(at)
            case "local", at, step, stall:
                rank.saved[int(step)] = float(at), float(stall)
    return rank


def replicated(coordinator: Coordinator) -> dict[int, float]:
    """Return when each step had its copies."""
    found = {}
    for line in coordinator.log("checkpoint.level"):
        _, step, _, level = line["reason"].split()
        if level == "REPLICATED":
            found[int(step)] = wall(line)
    return found


@dataclass
class Cost:
    """What was measured of one job."""

    stalls: list[float] = field(default_factory=list)
    """Seconds."""
    copying: list[float] = field(default_factory=list)
    """Seconds from LOCAL to REPLICATED."""
    writing: list[float] = field(default_factory=list)
    """Training's speed from the save to LOCAL, beside the speed alone."""
    after: list[float] = field(default_factory=list)
    """The same, for ``AFTER`` from LOCAL on."""


def measure(replicas: int, work: str, size: int, repeats: int) -> Cost:
    """Let a job save some times."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        (folder / "checkpoints").mkdir()
        coordinator = stack.enter_context(Coordinator(folder))

        def program(disk: Path) -> list[str]:
            return [str(RANK), str(folder), str(replicas), str(size // NODES), work, str(disk)]

        nodes = stack.enter_context(Nodes(folder, "muster", coordinator.endpoint, NODES, 1, program))
        for _ in range(NODES):
            nodes.start()

        def ranks() -> list[Rank]:
            return [read(path) for path in folder.glob("rank-*")]

        def done() -> bool:
            counts = [len(rank.saved) for rank in ranks()]
            counts += [len(replicated(coordinator))] * bool(replicas)
            return len(counts) >= NODES and min(counts) > repeats

        if not nodes.wait(done):
            raise RuntimeError(f"the job does not save: {nodes.last_words()}")
        copied, cost = replicated(coordinator), Cost()
        for rank in ranks():
            # The first save makes buffers and connections that the others have.
            for step, (local, stall) in sorted(rank.saved.items())[1 : repeats + 1]:
                cost.stalls.append(stall)
                began = rank.began[step]
                alone = rank.speed((began - QUIET, began))
                assert alone is not None
                windows = ((cost.writing, (began, local)), (cost.after, (local, local + AFTER)))
                for speeds, during in windows:
                    if (speed := rank.speed(during)) is not None:
                        speeds.append(speed / alone)
                if replicas:
                    cost.copying.append(copied[step] - local)
    return cost


def main() -> None:
    """Run each case, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=6, help="saves of each job")
    parser.add_argument("--mib", type=int, default=1024, help="of all parts together")
    arguments = parser.parse_args()
    print(describe_machine(Path(tempfile.gettempdir())))
    print("| A step | Copies | Stall of a save | Copying | Speed while writing | Speed after that |")
    print("|-|-|-|-|-|-|")
    for work in ("waits", "computes"):
        for replicas in (0, 1):
            cost = measure(replicas, work, arguments.mib << 20, arguments.repeats)
            cells = [
                shown([1000 * one for one in cost.stalls], "ms"),
                shown(cost.copying),
                shown(cost.writing, "×", 2),
                shown(cost.after, "×", 2),
            ]
            print(f"| {work} | {replicas} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
