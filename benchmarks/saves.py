"""Measure saves side by side: Muster, torch's async_save, nvidia-resiliency-ext and others.

Run it from the root of the repository: `python -m benchmarks.saves`, on a GPU with `--device cuda`.
"""

import argparse
import ctypes
import gc
import json
import mmap
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from benchmarks.machine import describe_machine, describe_versions
from benchmarks.peers.saves import SAVERS, Saver, State, remove
from lab.processes.coordinator import Coordinator
from muster.worker.saves.memory.staging import available_memory

GIB = 2**30
TENSOR_BYTES = 16 * 2**20
"""Of each tensor of the state."""
PROBE_SECONDS = 0.1
GIVE_UP = 90.0
"""Seconds that one save may take."""
LOOK_EVERY = 0.01
"""Seconds that training goes on, at least, between two looks whether a save is done: a job's short step."""
PAUSE = 3.0
"""Seconds between two saves, for each GiB: a job's are minutes apart."""
SPAWN = mp.get_context("spawn")


@dataclass
class Sample:
    """One save."""

    stall: float
    """Seconds that the training thread spent in the system's calls."""
    durable: float
    """Seconds from the call to the moment when the save was decided and synced."""
    training: float
    """Speed of training meanwhile, as a part of its speed without a save; 0 if there was no meanwhile."""
    torn: bool
    """Whether what was saved is not the state at the call."""
    memory: float = 0.0
    """Anonymous and shared memory of the process and its children at its peak, above the state, in GiB."""


@dataclass
class Cell:
    """One system at one size."""

    system: str
    gib: int
    first: Sample | None = None
    """The first save of a process, which also sets up what the system keeps."""
    samples: list[Sample] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    date: str = ""
    """The day of the run."""

    def median(self, name: str) -> float | None:
        """The median of a figure."""
        values = [getattr(sample, name) for sample in self.samples]
        return statistics.median(values) if values else None

    def most(self, name: str) -> float | None:
        """The highest of a figure, the first save's included."""
        every = [*([self.first] if self.first else []), *self.samples]
        return max((getattr(sample, name) for sample in every), default=None)


# ---------------------------------------------------------------------- the training process


def train(system: str, gib: int, repeats: int, device: str, folder: Path, pipe: Connection) -> None:
    """A training process of one rank that saves and trains on."""
    import torch

    # The other core is the writer's.
    torch.set_num_threads(1)
    try:
        state = {
            f"layer-{number}": torch.zeros(TENSOR_BYTES // 4, device=device)
            for number in range(gib * GIB // TENSOR_BYTES)
        }
        saver = SAVERS[system][1](folder)
        trainer = _Trainer(state, torch.cuda.synchronize if device == "cuda" else lambda: None)
        speed = trainer.speed_alone()
        for number in range(repeats + 1):
            pipe.send("begin")
            pipe.recv()
            sample = _save(saver, number, trainer, speed)
            pipe.send("end")
            pipe.recv()
            sample.torn = _is_torn(saver, number, trainer.at_call, device)
            # What was loaded would count as the next save's memory.
            gc.collect()
            ctypes.CDLL(None).malloc_trim(0)
            pipe.send(sample)
            remove(folder, number - 1)
        saver.close()
        pipe.send(None)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        raise
    finally:
        if "muster" in system:
            import muster.worker

            muster.worker.close()


class _Trainer:
    """Training: one tensor after the other is changed in place."""

    def __init__(self, state: State, synchronize: Callable[[], None]) -> None:
        self.state = state
        self._synchronize = synchronize
        self._tensors = list(state.values())
        self._step = 0
        self.at_call: list[float] = []

    def step(self) -> None:
        self._tensors[self._step % len(self._tensors)].add_(1)
        self._synchronize()
        self._step += 1

    def speed_alone(self) -> float:
        """Steps a second, when nothing else is done."""
        count = 2 * len(self._tensors)
        began = time.monotonic()
        for _ in range(count):
            self.step()
        return count / (time.monotonic() - began)


def _save(saver: Saver, number: int, trainer: _Trainer, speed: float) -> Sample:
    trainer.at_call = [float(tensor[0]) for tensor in trainer.state.values()]
    began = time.monotonic()
    saver.save(number, trainer.state)
    stall = time.monotonic() - began
    steps, trained = 0, 0.0
    while True:
        looked = time.monotonic()
        done = saver.done()
        now = time.monotonic()
        if done:
            # What it does to sync is not the training thread's wait: a job would do so elsewhere.
            break
        stall += now - looked
        while (spent := time.monotonic() - now) < LOOK_EVERY:
            trainer.step()
            steps += 1
        trained += spent
    return Sample(stall, now - began, steps / trained / speed if trained > 0.05 else 0.0, torn=False)


def _is_torn(saver: Saver, number: int, expected: list[float], device: str) -> bool:
    import torch

    empty = {f"layer-{n}": torch.empty(TENSOR_BYTES // 4, device=device) for n in range(len(expected))}
    loaded = saver.load(number, empty)
    return any(
        not torch.equal(tensor, torch.full_like(tensor, value))
        for tensor, value in zip(loaded.values(), expected, strict=True)
    )


# ---------------------------------------------------------------------- one cell


class _MemoryProbe:
    """Watches the memory from the side, from begin to end."""

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


def measure(cell: Cell, repeats: int, device: str, folder: Path, endpoint: str) -> None:
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
            word = _expect(ours)
            if word is None:
                return
            if word != "begin":
                raise RuntimeError(str(word))
            if cell.first is not None:
                time.sleep(PAUSE * cell.gib)
            warm(2 * cell.gib + 1)
            probe = _MemoryProbe(process.pid, cell.gib)
            ours.send("go")
            word = _expect(ours)
            probe.end()
            if word != "end":
                raise RuntimeError(str(word))
            ours.send("go")
            sample = _expect(ours)
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


def _expect(pipe: Connection) -> Any:  # noqa: ANN401
    if not pipe.poll(GIVE_UP):
        raise RuntimeError(f"not through after {GIVE_UP:.0f} s")
    return pipe.recv()


# ---------------------------------------------------------------------- fork


def measure_forks(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """How long a fork takes as the resident memory grows, with small pages and with huge ones."""
    found = []
    for gib in sizes:
        for huge in (False, True):
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=_fork, args=(gib, huge, repeats, theirs))
            process.start()
            theirs.close()
            seconds = _expect(ours)
            process.join()
            found.append({"gib": gib, "huge_pages": huge, "seconds": seconds})
            print(
                f"fork  {gib} GiB  huge pages: {huge!s:<5}  {statistics.median(seconds) * 1000:.1f} ms",
                file=sys.stderr,
            )
    return found


def _fork(gib: int, huge: bool, repeats: int, pipe: Connection) -> None:
    memory = mmap.mmap(-1, gib * GIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    for _ in range(gib * GIB // TENSOR_BYTES):
        memory.write(bytes(TENSOR_BYTES))
    seconds = []
    for _ in range(repeats):
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        seconds.append(time.monotonic() - began)
        os.waitpid(pid, 0)
    pipe.send(seconds)


# ---------------------------------------------------------------------- the way to the host


def measure_copies(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """How long a state on a GPU takes to pinned memory that is there: what no stall can be below."""
    found = []
    for gib in sizes:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(target=_copy, args=(gib, repeats, theirs))
        process.start()
        theirs.close()
        found.append({"gib": gib, "seconds": _expect(ours)})
        process.join()
    return found


def _copy(gib: int, repeats: int, pipe: Connection) -> None:
    import torch

    number = gib * GIB // TENSOR_BYTES
    here = [torch.zeros(TENSOR_BYTES // 4, device="cuda") for _ in range(number)]
    there = [torch.empty(TENSOR_BYTES // 4, pin_memory=True) for _ in range(number)]
    seconds = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        began = time.monotonic()
        for source, target in zip(here, there, strict=True):
            target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    pipe.send(seconds[1:])


# ---------------------------------------------------------------------- the report


def targets(cells: list[Cell]) -> list[tuple[str, str, str, bool]]:
    """What was aimed at, by size: the figure's name, the target, the measured, whether it is met."""
    rows = []
    for gib in sorted({cell.gib for cell in cells}):
        ours = [c for c in cells if c.gib == gib and c.system.startswith("muster") and c.samples]
        peers = [c for c in cells if c.gib == gib and not c.system.startswith("muster") and c.samples]
        honest = [c for c in peers if not any(sample.torn for sample in c.samples)]
        mine = next((c for c in ours if c.system == "muster"), None)
        if mine is None or not honest:
            continue
        stall, durable = _figure(mine, "stall"), _figure(mine, "durable")
        least = min(honest, key=lambda c: _figure(c, "stall"))
        fastest = min([*ours, *honest], key=lambda c: _figure(c, "durable"))
        best_stall, best = _figure(least, "stall"), _figure(fastest, "durable")
        rows.append(
            (
                f"stall of Checkpointer, {gib} GiB",
                f"at most {800 * best_stall:.1f} ms (0.8 x {SAVERS[least.system][0]})",
                f"{stall * 1000:.1f} ms",
                stall <= 0.8 * best_stall,
            )
        )
        rows.append(
            (
                f"time to durable of Checkpointer, {gib} GiB",
                f"at most {1.1 * best:.2f} s (1.1 x {SAVERS[fastest.system][0]})",
                f"{durable:.2f} s",
                durable <= 1.1 * best,
            )
        )
    return rows


def _figure(cell: Cell, name: str) -> float:
    value = cell.median(name)
    assert value is not None
    return value


def page(found: "Found") -> str:
    """The page for the documentation."""
    report, cells, forks = found.machine, found.cells, found.forks
    on_gpu = report.get("device", "cpu") != "cpu"
    parts = [_INTRODUCTION if not on_gpu else _INTRODUCTION_GPU]
    for gib in sorted({cell.gib for cell in cells}):
        parts += [f"## {gib} GiB", _table([cell for cell in cells if cell.gib == gib])]
    rows = targets(cells)
    if rows:
        lines = ["| figure | target | measured | met |", "|-|-|-|-|"]
        lines += [f"| {a} | {b} | {c} | {'yes' if met else 'no'} |" for a, b, c, met in rows]
        parts += ["## Targets", "\n".join(lines), _TARGETS]
    if forks:
        parts += ["## Fork", _FORK, _fork_table(forks)]
    if found.copies:
        parts += ["## The copy to the host", _COPY, _copy_table(found.copies)]
    failed = [f"- {SAVERS[c.system][0]}, {c.gib} GiB: {text[:120]}" for c in cells for text in c.failures]
    if failed:
        parts += ["## Failed measurements", "\n".join(failed)]
    machine = "\n".join(f"- {key}: {value}" for key, value in report.items())
    parts += [_METHOD, *([] if on_gpu else [_CAUTION]), "## Machine", machine]
    return "\n\n".join(parts) + "\n"


def _table(cells: list[Cell]) -> str:
    lines = [
        "| system | measured on | saves | stall, ms | stall of the first save, ms | time to durable, s "
        "| training meanwhile | memory above the state, GiB | state as at the call |",
        "|-|-|-|-|-|-|-|-|-|",
    ]
    for cell in cells:
        if not cell.samples or cell.first is None:
            continue
        training = _figure(cell, "training")
        torn = sum(sample.torn for sample in [cell.first, *cell.samples])
        lines.append(
            f"| {SAVERS[cell.system][0]} | {cell.date} | {len(cell.samples)} "
            f"| {_figure(cell, 'stall') * 1000:.1f} | {cell.first.stall * 1000:.0f} "
            f"| {_durable(cell)} | {f'{training:.0%}' if training else '–'} "
            f"| {cell.most('memory'):.1f} "
            f"| {f'no, {torn} of {len(cell.samples) + 1} torn' if torn else 'yes'} |"
        )
    return "\n".join(lines)


def _durable(cell: Cell) -> str:
    """Return the median time to durable of a cell, the lowest and the highest."""
    seconds = [sample.durable for sample in cell.samples]
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f}–{max(seconds):.2f})"


def _fork_table(forks: list[dict[str, Any]]) -> str:
    lines = ["| resident memory, GiB | pages of 4 KiB, ms | huge pages, ms |", "|-|-|-|"]
    for gib in sorted({fork["gib"] for fork in forks}):
        of = {f["huge_pages"]: statistics.median(f["seconds"]) * 1000 for f in forks if f["gib"] == gib}
        lines.append(f"| {gib} | {of[False]:.1f} | {of[True]:.1f} |")
    return "\n".join(lines)


def _copy_table(copies: list[dict[str, Any]]) -> str:
    lines = ["| state, GiB | ms | GiB/s |", "|-|-|-|"]
    for copy in copies:
        seconds = statistics.median(copy["seconds"])
        lines.append(f"| {copy['gib']} | {seconds * 1000:.1f} | {copy['gib'] / seconds:.1f} |")
    return "\n".join(lines)


_INTRODUCTION_GPU = """# Saves of a state on a GPU, beside the peers

What an asynchronous save costs the training thread, and when it is on the disk, in turn, on one machine, the
same state."""

_COPY = """How long the state takes to pinned memory that is there already, by nothing but copies."""

_INTRODUCTION = """# Saves beside the peers

What an asynchronous save costs the training thread, and when it is on the disk, for Muster and what else
saves PyTorch state: in turn, on one machine, the same state. Saves of one system differ by a factor of up to
three here, so that smaller differences say little.

Checkpointer and nvidia-resiliency-ext fork. A fork of small pages takes most of the latter's stall. Between
saves, Checkpointer asks the kernel to put the state's memory into huge pages. A fork of them takes a few
milliseconds (both are below). The rest of its stall is a look at how the memory is mapped, the plan, and the
wait until the child reports that it lives.

The time to durable of one system differs by a factor of up to three from save to save here. Most of that is
the memory for the page cache, not the disk: writing 1 GiB into the page cache took 0.2 s to 2.5 s here, and
the sync after it 0.3 s to 0.4 s. On ext4 and XFS, Checkpointer therefore writes past the page
cache (`O_DIRECT`), since 2026-11-25: its figures from before that day are from before this change."""

_TARGETS = """A system whose checkpoint was not the state at the call is left out of the targets."""

_FORK = """How long `os.fork()` takes in a process that does nothing else, as its resident memory grows.
Torch's allocator gets
huge pages for CPU tensors only if asked to (`THP_MEM_ALLOC_ENABLE=1`)."""

_METHOD = """## How it was measured

- One rank on tensors of 16 MiB each. A system is measured in a process of its own: a first save,
  which sets
  up what the system keeps, then the others. Figures are medians of the others; memory is the highest of
  all.
- *Training* changes one tensor after the other in place, on one thread, from the moment when the call
  returns until the save is done. That is the worst case for copy-on-write: no compute between the changes.
  *Training meanwhile* is its speed during the save, as a part of its speed before the first one.
- *Stall* is the time in the call that begins the save, and in all looks whether it is done, one for each
  10 ms of training. The last look, which finds it done, is not in it, for the benchmark syncs there what the
  system has not synced.
- *Time to durable* is from the call to the moment when the save is done and on the disk. Muster's
  Checkpointer syncs,
  lets the coordinator decide twice and renames. torch's async_save syncs its data files; the benchmark
  syncs the rest. For
  TorchAsyncCheckpoint, nvidia-resiliency-ext and torch_checkpointing the benchmark syncs everything. The
  time has the grain of the
  looks.
- *Memory above the state* is the anonymous and shared memory of the process and its children at the peak
  of a save, each page once, less the state. The interpreter and torch are in it, pages of files are not.
- Between two saves are 3 s for each GiB of the state. A job saves minutes apart; Checkpointer puts the state
  into huge pages then, which takes it up to that the first time, on this virtual machine.
- The save before the last one is removed before the next begins, so that each system has one older save on
  the disk. Before each save, twice the state's size of memory is touched and freed, since this virtual
  machine gives free memory back to its host.
- *State as at the call*: every save is loaded again and compared with what the state was when it was
  called.
- Muster's coordinator is a process of its own on SQLite. nvidia-resiliency-ext asks for a GPU, and its
  calls
  of `torch.cuda.synchronize` and `current_device` are replaced here; with CPU tensors it does not copy. For
  torch_checkpointing the wait for its staging is in the stall: before it, the state must not be changed."""

_CAUTION = """## What to keep in mind

- One run on 2 cores and one disk. With one rank the wait for other ranks is not in it.
- Buffers of checks that were done in between may be in the memory of `Checkpointer(copy=True)`.
- No GPU: the copies from a device, and the peers' paths that are made for it, are not measured.
- A checkpoint that was written past the page cache is read from the disk by the next load.
- Checkpointer's children write no checksums (CRC-32), which torch does not check when it loads. The others
  do. That is about half a second per GiB here."""


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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--gib", type=int, nargs="+", default=[1, 4], help="sizes of the state")
    parser.add_argument("--systems", nargs="+", choices=list(SAVERS), default=list(SAVERS))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the state is")
    parser.add_argument("--repeats", type=int, default=3, help="saves of each cell after the first")
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
    found = _read(output) if arguments.render_only else _run(arguments, output)
    (arguments.docs / f"{name}.md").write_text(page(found))
    return 1 if any(cell.failures for cell in found.cells) else 0


@dataclass
class Found:
    """All that was measured."""

    machine: dict[str, Any]
    cells: list[Cell]
    forks: list[dict[str, Any]]
    copies: list[dict[str, Any]]


def _run(arguments: argparse.Namespace, output: Path) -> Found:
    report: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "device": arguments.device,
        **_describe(arguments.folder),
    }
    forks = measure_forks(arguments.fork_gib, 5)
    copies = measure_copies(arguments.gib, 5) if arguments.device == "cuda" else []
    cells = [Cell(system, gib, date=report["date"]) for gib in arguments.gib for system in arguments.systems]
    before = _read(output) if arguments.add else Found({}, [], [], [])
    measured = {(cell.system, cell.gib) for cell in cells}
    others = [cell for cell in before.cells if (cell.system, cell.gib) not in measured]
    with tempfile.TemporaryDirectory() as state, Coordinator(Path(state)) as coordinator:
        for cell in cells:
            with tempfile.TemporaryDirectory(dir=arguments.folder, prefix=".saves-") as folder:
                os.sync()
                measure(
                    cell, arguments.repeats, arguments.device, Path(folder).resolve(), coordinator.endpoint
                )
            found = Found(report, others + cells, before.forks + forks, before.copies + copies)
            output.write_text(json.dumps(asdict(found), indent=1))
            if cell.failures:
                print(f"{cell.system:<24} {cell.gib} GiB  failed: {cell.failures[0]}", file=sys.stderr)
            else:
                print(
                    f"{cell.system:<24} {cell.gib} GiB  stall {_figure(cell, 'stall') * 1000:8.1f} ms  "
                    f"durable {_figure(cell, 'durable'):6.2f} s  training {_figure(cell, 'training'):4.0%}  "
                    f"memory {cell.most('memory'):.1f} GiB",
                    file=sys.stderr,
                    flush=True,
                )
    return found


def _read(path: Path) -> Found:
    found = json.loads(path.read_text())
    cells = []
    for cell in found["cells"]:
        first = Sample(**cell["first"]) if cell["first"] else None
        samples = [Sample(**sample) for sample in cell["samples"]]
        cells.append(Cell(cell["system"], cell["gib"], first, samples, cell["failures"], cell["date"]))
    return Found(found["machine"], cells, found["forks"], found.get("copies", []))


if __name__ == "__main__":
    sys.exit(main())
