"""Measure rendezvous side by side: Muster and torch's c10d backend.

Run it from the root of the repository: `python -m benchmarks.rendezvous`.

The time is from the moment when all nodes are told to join to the moment when the last one is through:
has its rank, and knows where rank 0 is. `muster` and `c10d` are the handlers that torchrun uses, a thread for
each node; `muster-nodes` are nodes that do the same on the wire, so that one machine can play thousands.
"""

import asyncio
import json
import multiprocessing as mp
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.machine import describe_machine, describe_versions
from lab.open_files import allow_many_files
from lab.processes.coordinator import Coordinator, free_port

HANDLERS = ("muster", "c10d")
"""What torchrun uses."""
TITLES = {
    "muster": "Muster, torchrun's handler",
    "c10d": "torch's c10d, torchrun's handler",
    "muster-nodes": "Muster, nodes on the wire",
}
GIVE_UP = 400.0
"""Seconds that one measurement may take."""
SPAWN = mp.get_context("spawn")


@dataclass
class Cell:
    """One system at one number of nodes."""

    system: str
    nodes: int
    seconds: list[float] = field(default_factory=list)
    """Figures of each repeat."""
    failures: list[str] = field(default_factory=list)

    @property
    def median(self) -> float | None:
        """The median time."""
        return statistics.median(self.seconds) if self.seconds else None


# ---------------------------------------------------------------------- the nodes of one process


def play_handlers(system: str, port: int, run_id: str, nodes: int, share: range, pipe: Connection) -> None:
    """Nodes that are the handlers of torchrun, each on a thread of its own."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    handlers = []
    for number in share:
        config = {"is_host": number == 0} if system == "c10d" else {}
        parameters = RendezvousParameters(
            system, f"127.0.0.1:{port}", run_id, nodes, nodes, local_addr="127.0.0.1", timeout=900, **config
        )
        handlers.append(get_rendezvous_handler(parameters))
        if number == 0:
            pipe.send("first")
    pipe.send("ready")
    pipe.recv()
    through: list[float] = []
    failed: list[str] = []

    def join(handler: "object") -> None:
        try:
            handler.next_rendezvous()  # type: ignore[attr-defined]
            through.append(time.monotonic())
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=join, args=(handler,), daemon=True) for handler in handlers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GIVE_UP)
    missing = len(handlers) - len(through)
    pipe.send(failed[0] if failed else f"{missing} nodes are not through" if missing else max(through))
    pipe.recv()


def play_nodes(system: str, port: int, run_id: str, nodes: int, share: range, pipe: Connection) -> None:
    """Nodes that speak the protocol with as little as possible around it."""
    import grpc.aio
    import uvloop

    from lab import aio
    from muster.v1 import rendezvous_pb2, store_pb2

    keys = ["MASTER_ADDR", "MASTER_PORT"]

    async def join(number: int) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        request = rendezvous_pb2.JoinRequest(
            run_id=run_id,
            node=rendezvous_pb2.Node(incarnation=uuid.uuid4().hex, address=f"node-{number}", pid=number),
            attempt=1,
            min_nodes=nodes,
            max_nodes=nodes,
            join_timeout_ms=600_000,
            last_call_timeout_ms=30_000,
            keep_alive_timeout_ms=15_000,
            protocol_version=1,
        )
        stream = aio.rendezvous(channel).Join(request)
        streams.append((channel, stream))
        async for response in stream:
            if response.HasField("round_complete"):
                break
        store = aio.stores(channel)
        if response.round_complete.rank == 0:
            entries = [store_pb2.KeyValue(key=key, value=b"127.0.0.1") for key in keys]
            await store.Set(store_pb2.SetRequest(run_id=run_id, entries=entries))
        await store.Get(store_pb2.StoreServiceGetRequest(run_id=run_id, keys=keys, timeout_ms=300_000))

    async def all_join() -> float:
        await asyncio.gather(*(join(number) for number in share))
        return time.monotonic()

    streams: list[object] = []
    allow_many_files()
    pipe.send("ready")
    pipe.recv()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            pipe.send(runner.run(all_join()))
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
        pipe.recv()


# ---------------------------------------------------------------------- one measurement


def measure(system: str, nodes: int, processes: int, port: int) -> float:
    """Seconds until the last of the nodes was through.

    Raises:
        RuntimeError: it was not.
    """
    run_id = f"bench-{uuid.uuid4().hex[:8]}"
    play: Callable[..., None] = play_handlers if system in HANDLERS else play_nodes
    if system == "c10d":
        port = free_port()
    children = []
    shares = [range(first, nodes, processes) for first in range(min(processes, nodes))]
    for share in shares:
        ours, theirs = SPAWN.Pipe()
        child = SPAWN.Process(target=play, args=(system, port, run_id, nodes, share, theirs), daemon=True)
        child.start()
        theirs.close()
        children.append((child, ours))
        if share.start == 0 and system in HANDLERS:
            # With c10d the first node hosts what the others connect to.
            _expect(ours, "first")
    try:
        for _, pipe in children:
            _expect(pipe, "ready")
        started = time.monotonic()
        for _, pipe in children:
            pipe.send("go")
        ends = []
        for _, pipe in children:
            if not pipe.poll(GIVE_UP + 10):
                raise RuntimeError(f"not through after {GIVE_UP:.0f} s")
            end = pipe.recv()
            if not isinstance(end, float):
                raise RuntimeError(end)
            ends.append(end)
        return max(ends) - started
    finally:
        for child, _ in children:
            child.kill()
            child.join()


def _expect(pipe: Connection, word: str) -> None:
    if not pipe.poll(120) or pipe.recv() != word:
        raise RuntimeError("the nodes did not start")


# ---------------------------------------------------------------------- the report


def page(report: dict[str, object], cells: list[Cell]) -> str:
    """The page for the documentation."""
    sizes = sorted({cell.nodes for cell in cells})
    systems = list(dict.fromkeys(cell.system for cell in cells))
    rows = [
        "| nodes | " + " | ".join(TITLES[system] for system in systems) + " | c10d / Muster |",
        "|-" * (len(systems) + 2) + "|",
    ]
    for size in sizes:
        of = {cell.system: cell for cell in cells if cell.nodes == size}
        ratio = "–"
        ours, theirs = (of[name].median if name in of else None for name in HANDLERS)
        if ours and theirs:
            ratio = f"{theirs / ours:.0f}"
        rows.append(
            f"| {size} | " + " | ".join(_cell(of.get(system)) for system in systems) + f" | {ratio} |"
        )
    failures = [f"- {TITLES[c.system]}, {c.nodes} nodes: {text}" for c in cells for text in c.failures]
    machine = "\n".join(f"- {key}: {value}" for key, value in report.items())
    return f"""# Rendezvous beside torch's c10d

How long it takes until the last of N nodes has its rank and knows where rank 0 is, with min = max = N: all
in one run, in turn, on one machine that nodes and coordinator share. The figure is the median of the repeats,
in seconds. Take the ratios with you.

![Time until the last node is through, over the number of nodes](rendezvous.svg)

{chr(10).join(rows)}

{"## Failed measurements" + chr(10) * 2 + chr(10).join(failures) + chr(10) if failures else ""}
## How it was measured

- *torchrun's handler* is what torchrun calls: `next_rendezvous()` of the registered backend, a thread for
  each node, in a few processes. With c10d, the first node hosts the TCPStore, as in a job; the connection
  to it is made before the clock starts. Muster's coordinator is a process of its own on SQLite, and each
  node's connection is made while the clock runs.
- *Nodes on the wire* do the same without torch and threads, each on a connection of its own: join, and read
  the address of rank 0 from the store.
- c10d's nodes poll once a second, race to swap one state of all nodes, and sleep up to 0.3 s before they
  begin; Muster's are answered by push.

## Machine

{machine}
"""


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "–"
    return f"{cell.median:.2f}" if cell.median is not None else "failed"


def draw(cells: list[Cell], path: Path) -> None:
    """Write the chart to an SVG file."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "muster"
    figure = Figure(figsize=(7, 4.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    styles = {
        "muster": ("#0072B2", "o", "-"),
        "c10d": ("#E69F00", "^", "-"),
        "muster-nodes": ("#56B4E9", "s", "--"),
    }
    for system, (colour, marker, line) in styles.items():
        points = [(c.nodes, c.median) for c in cells if c.system == system and c.median is not None]
        if points:
            axes.plot(*zip(*points, strict=True), colour, marker=marker, linestyle=line, label=TITLES[system])
    sizes = sorted({cell.nodes for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("nodes")
    axes.set_title("Time until the last node is through (s)", loc="left", fontsize=11)
    axes.grid(True, color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> int:
    """Run the benchmark; the exit status is 1 if any measurement failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 32, 64, 128], metavar="N")
    parser.add_argument("--wire-nodes", type=int, nargs="+", default=[128, 512, 1024, 4096], metavar="N")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="that play the nodes")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/rendezvous.json"))
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    cells = [Cell(system, nodes) for nodes in arguments.nodes for system in HANDLERS]
    cells += [Cell("muster-nodes", nodes) for nodes in arguments.wire_nodes]
    allow_many_files()
    with tempfile.TemporaryDirectory() as folder, Coordinator(Path(folder)) as coordinator:
        report: dict[str, object] = {
            "date": datetime.now(UTC).date().isoformat(),
            "repeats": arguments.repeats,
            "processes that play the nodes": arguments.processes,
            **describe_machine(Path(folder)),
            **describe_versions(),
        }
        for repeat in range(arguments.repeats):
            for cell in cells:
                try:
                    seconds = measure(cell.system, cell.nodes, arguments.processes, coordinator.port)
                    cell.seconds.append(seconds)
                    outcome = f"{seconds:7.2f} s"
                except RuntimeError as error:
                    cell.failures.append(str(error))
                    outcome = f"failed: {error}"
                print(f"{repeat + 1}/{arguments.repeats}  {cell.system:<13} {cell.nodes:>5} nodes  {outcome}")
    arguments.output.write_text(json.dumps(report | {"cells": [asdict(cell) for cell in cells]}, indent=1))
    draw(cells, arguments.docs / "rendezvous.svg")
    (arguments.docs / "rendezvous.md").write_text(page(report, cells))
    return 1 if any(cell.failures for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
