"""Measure saves side by side: Muster, torch's async_save, nvidia-resiliency-ext and others.

Run it from the root of the repository: `python -m benchmarks.saves`, on a GPU with `--device cuda`.
"""

import argparse
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.machine import describe_machine, describe_versions
from benchmarks.peers.saves import SAVERS
from benchmarks.saving.floors import SPAWN, expect, measure_copies, measure_forks
from benchmarks.saving.page import page
from benchmarks.saving.results import PAUSE, Cell, Found, Sample, read
from benchmarks.saving.training import GIB, train
from lab.processes.coordinator import Coordinator
from muster.worker.saves.memory.staging import available_memory

PROBE_SECONDS = 0.1


class _MemoryProbe:
    """Watches the memory from the side, from begin to end.

    Args:
        pid: of the process that trains.
        gib: what its state takes of this memory.
    """

    def __init__(self, pid: int, gib: int) -> None:
        self._process = psutil.Process(pid)
        self._gib = gib
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.memory = 0.0
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(PROBE_SECONDS):
            try:
                family = [self._process, *self._process.children(recursive=True)]
            except psutil.NoSuchProcess:
                continue
            total = sum(own_memory(process.pid) for process in family)
            self.memory = max(self.memory, total - self._gib)

    def end(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join()


def warm(gib: int) -> None:
    """Have the machine hold so much free memory that was used just now.

    A virtual machine may give free memory back to its host. Getting a page of it again takes several
    times as long as a page that is there, and would make the order of the saves matter.
    """
    size = min(gib * GIB, available_memory() - 2 * GIB)
    mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()


def own_memory(pid: int) -> float:
    """A process's anonymous and shared memory in GiB, its share of each page that others have, too."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0.0  # It has ended.
    fields = dict(line.split(":") for line in lines)
    return sum(int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem")) / 2**20


def measure(cell: Cell, repeats: int, device: str, pause: float, folder: Path, endpoint: str) -> None:
    """Measure one cell in a process of its own."""
    os.environ |= {
        "MUSTER_ENDPOINT": endpoint,
        "MUSTER_RUN_ID": f"{cell.system}-{cell.gib}",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=train, args=(cell.system, cell.gib, repeats, device, folder, theirs))
    process.start()
    theirs.close()
    assert process.pid is not None
    try:
        while True:
            word = expect(ours)
            if word is None:
                return
            if word != "begin":
                raise RuntimeError(str(word))
            if cell.first is not None:
                time.sleep(pause * cell.gib)
            warm(2 * cell.gib + 1)
            probe = _MemoryProbe(process.pid, cell.gib if device == "cpu" else 0)
            ours.send("go")
            word = expect(ours)
            probe.end()
            if word != "end":
                raise RuntimeError(str(word))
            ours.send("go")
            sample = expect(ours)
            if not isinstance(sample, Sample):
                raise RuntimeError(str(sample))
            sample.memory = probe.memory
            if cell.first is None:
                cell.first = sample
            else:
                cell.samples.append(sample)
    except (RuntimeError, EOFError) as error:
        cell.failures.append(str(error) or type(error).__name__)
    finally:
        # A process that hangs would leave its own children behind.
        family = psutil.Process(process.pid).children(recursive=True) if process.is_alive() else []
        process.join(0 if cell.failures else 30)
        process.kill()
        for left in family:
            if left.is_running():
                left.kill()
        process.join()


def _gpu(device: str) -> dict[str, str]:
    return {} if device == "cpu" else {"GPU": torch.cuda.get_device_name(0)}


def _describe(folder: Path) -> dict[str, str]:
    packages = {}
    for package in ("torch_checkpointing", "nvidia-resiliency-ext"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "not installed"
    found = describe_machine(folder) | describe_versions() | packages
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text().strip()
    for name in ("jax", "jaxlib"):
        found.pop(name, None)
    return found | {"transparent huge pages": thp.partition("[")[2].partition("]")[0]}


def main() -> int:
    """Run the benchmark; the exit status is 1 if any measurement failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--gib", type=int, nargs="+", default=[1, 4], help="sizes of the state")
    parser.add_argument("--systems", nargs="+", choices=list(SAVERS), default=list(SAVERS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the state is")
    parser.add_argument("--repeats", type=int, default=3, help="saves of each cell after the first")
    parser.add_argument(
        "--pause", type=float, default=3.0, help="seconds between two saves, for each GiB; jobs have minutes"
    )
    parser.add_argument("--fork-gib", type=int, nargs="*", default=[1, 4, 8, 16], help="sizes for the fork")
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results"), help="where to save")
    parser.add_argument("--output", type=Path, help="default: in benchmarks/results, by the device")
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--add", action="store_true", help="leave the other figures of --output as they are")
    parser.add_argument(
        "--render-only", action="store_true", help="measure nothing; report on --output again"
    )
    arguments = parser.parse_args()
    name = "saves" if arguments.device == "cpu" else f"saves-{arguments.device}"
    output = arguments.output or Path(f"benchmarks/results/{name}.json")
    found = read(output) if arguments.render_only else _run(arguments, output)
    (arguments.docs / f"{name}.md").write_text(page(found))
    return 1 if any(cell.failures for cell in found.cells) else 0


def _run(arguments: argparse.Namespace, output: Path) -> Found:
    report: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": arguments.device,
        **_gpu(arguments.device),
        PAUSE: str(arguments.pause),
        **_describe(arguments.folder),
    }
    forks = measure_forks(arguments.fork_gib, 5)
    copies = measure_copies(arguments.gib, 5) if arguments.device == "cuda" else []
    cells = [Cell(system, gib, date=report["date"]) for gib in arguments.gib for system in arguments.systems]
    before = read(output) if arguments.add else Found({}, [], [], [])
    measured = {(cell.system, cell.gib) for cell in cells}
    others = [cell for cell in before.cells if (cell.system, cell.gib) not in measured]
    with tempfile.TemporaryDirectory() as state, Coordinator(Path(state)) as coordinator:
        for cell in cells:
            with tempfile.TemporaryDirectory(dir=arguments.folder, prefix=".saves-") as folder:
                os.sync()
                measure(
                    cell,
                    arguments.repeats,
                    arguments.device,
                    arguments.pause,
                    Path(folder).resolve(),
                    coordinator.endpoint,
                )
            found = Found(report, others + cells, before.forks + forks, before.copies + copies)
            output.write_text(json.dumps(asdict(found), indent=1))
            if cell.failures:
                print(f"{cell.system:<24} {cell.gib} GiB  failed: {cell.failures[0]}", file=sys.stderr)
            else:
                print(
                    f"{cell.system:<24} {cell.gib} GiB  stall {cell.median('stall') * 1000:8.1f} ms  "
                    f"durable {cell.median('durable'):6.2f} s  training {cell.median('training'):4.0%}  "
                    f"memory {cell.highest('memory'):.1f} GiB",
                    file=sys.stderr,
                    flush=True,
                )
    return found


if __name__ == "__main__":
    sys.exit(main())
