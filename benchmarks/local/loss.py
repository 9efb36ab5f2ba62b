"""How long a job does not train after it has lost a node with its disk: ``python -m benchmarks.local.loss``.

Four nodes of two ranks train and save, each rank a part of its own, 1 GiB together, and a spare stands by.
Then a node is killed with its agent, ranks and keeper, and its disk is wiped. Jobs: Muster with local
checkpoints, and Muster on shared storage, both also with preloaded workers; and torchrun's ``c10d`` with
``dcp.async_save`` on the same storage. Shared storage passes 100 MB/s for all ranks together, and counts
what is read.
"""

import argparse
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.nodes import PRELOADED, Nodes
from benchmarks.processes import slow_bucket
from benchmarks.processes.local_rank import EVERY
from benchmarks.recovery import shown, wall
from lab.processes.coordinator import Coordinator, free_port
from muster.checkpoint.inventory import inventory_of

RANK = Path(__file__).parent.parent / "processes" / "local_rank.py"
NODES, PER_NODE = 4, 2
WORLD_SIZE = NODES * PER_NODE
READ_BYTES = 8 << 20


@dataclass
class Rank:
    """The moments of one process, on the monotonic clock."""

    started: float = 0.0
    loaded: tuple[float, float] = (0.0, 0.0)
    resumed: int = 0
    """The step."""
    steps: list[tuple[float, int]] = field(default_factory=list)


def ranks(folder: Path, since: float = 0.0) -> list[Rank]:
    """Return the processes that started after a time."""
    found = []
    for path in folder.glob("rank-*"):
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
    disk: float | None = None
    """How long it takes to read the parts of all ranks from the local disks, and nothing else."""


def is_saved(kind: str, folder: Path, coordinator: Coordinator | None, step: int) -> bool:
    """Return whether a step is as safe as the job makes it."""
    match kind:
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


def read_parts(folder: Path) -> float:
    """Read a part of each rank from the nodes' disks, all at once, after dropping them from the page cache.

    Returns:
        The seconds that the slowest took.
    """
    parts = {path.name: path for disk in folder.glob("disk-*") for path in newest_parts(disk)}
    assert len(parts) == WORLD_SIZE, parts
    for path in parts.values():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(path: Path) -> None:
        buffer = bytearray(READ_BYTES)
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    began = time.monotonic()
    with ThreadPoolExecutor(WORLD_SIZE) as readers:
        list(readers.map(read, parts.values()))
    return time.monotonic() - began


def newest_parts(disk: Path) -> list[Path]:
    """Return the parts of the newest attempt on a disk."""
    attempts = {path.parent for path in disk.glob("*/*/*.distcp")}
    return sorted(max(attempts, key=lambda one: one.stat().st_mtime).glob("*.distcp")) if attempts else []


def recover(name: str, size: int) -> Recovery:
    """Let a job lose a node once."""
    kind = name.removesuffix(PRELOADED)
    slow_bucket.reset()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        coordinator, endpoint = None, f"127.0.0.1:{free_port()}"
        if kind != "c10d":
            coordinator = stack.enter_context(Coordinator(folder, session_ttl=10.0, reset_grace=3.0))
            endpoint = coordinator.endpoint
        checkpoints = folder / "checkpoints"

        def program(disk: Path) -> list[str]:
            return [str(RANK), str(folder), kind, str(size // WORLD_SIZE), str(disk)]

        backend = "c10d" if kind == "c10d" else "muster"
        nodes = stack.enter_context(
            Nodes(folder, backend, endpoint, NODES, PER_NODE, program, preload=kind != name)
        )
        nodes.start()
        time.sleep(1.0)  # Its store, if there is one, is on the first node.
        for _ in range(NODES - 1):
            nodes.start()
        if not nodes.wait(lambda: len(ranks(folder)) >= WORLD_SIZE):
            raise RuntimeError(f"{kind} does not train: {nodes.last_words()}")
        nodes.start()  # The spare stands by.
        if not nodes.wait(lambda: is_saved(kind, checkpoints, coordinator, 2 * EVERY)):
            raise RuntimeError(f"{kind} does not save: {nodes.last_words()}")
        last = max(rank.steps[-1][1] for rank in ranks(folder))
        read_before, _ = slow_bucket.transferred()
        at, at_wall = time.monotonic(), time.time()
        nodes.lose(NODES - 1)

        def trains() -> bool:
            return len([rank for rank in ranks(folder, at) if rank.steps]) >= WORLD_SIZE

        if not nodes.wait(trains, lost=NODES - 1):
            return Recovery()
        found = ranks(folder, at)[-WORLD_SIZE:]
        gone, complete = (
            [wall(line) - at_wall for line in coordinator.log(event)] if coordinator is not None else []
            for event in ("node.gone", "round.completed")
        )
        read = slow_bucket.transferred()[0] - read_before
        nodes.end()
        return Recovery(
            gone[0] if gone else None,
            complete[-1] if complete else None,
            max(rank.started for rank in found) - at,
            max(rank.loaded[1] - rank.loaded[0] for rank in found),
            max(rank.steps[0][0] for rank in found) - at,
            last - min(rank.resumed for rank in found),
            read,
            read_parts(folder) if kind == "local" else None,
        )


def main() -> None:
    """Run each case several times, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mib", type=int, default=1024, help="of all parts together")
    kinds = ["local", f"local{PRELOADED}", "shared", f"shared{PRELOADED}", "c10d"]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    arguments = parser.parse_args()
    print(describe_machine(Path(tempfile.gettempdir())))
    print(
        "| Job | Detected | Round complete | Ranks started | Load | Only reading | First step | Steps lost | "
        "Read from shared storage | Died |"
    )
    print("|-|-|-|-|-|-|-|-|-|-|")
    for kind in arguments.kinds:
        found = [recover(kind, arguments.mib << 20) for _ in range(arguments.repeats)]
        steps = [one.lost_steps for one in found if one.lost_steps is not None]
        cells = [
            shown([one.detected for one in found]),
            shown([one.round for one in found]),
            shown([one.started for one in found]),
            shown([one.loading for one in found]),
            shown([one.disk for one in found]),
            shown([one.trained for one in found]),
            f"{median(steps):.0f}" if steps else "–",
            f"{max(one.read for one in found) / 1e6:,.1f} MB",
            f"{sum(one.trained is None for one in found)} of {len(found)}",
        ]
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
