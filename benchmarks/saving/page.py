"""The page of the documentation about saves."""

import statistics
from typing import Any

from benchmarks.peers.saves import SAVERS
from benchmarks.saving.results import PAUSE, Cell, Found


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
        stall, durable = mine.median("stall"), mine.median("durable")
        least = min(honest, key=lambda c: c.median("stall"))
        others = [c for c in [*ours, *honest] if c is not mine]
        fastest = min(others, key=lambda c: c.median("durable"))
        best_stall, best = least.median("stall"), fastest.median("durable")
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


def page(found: Found) -> str:
    """The page for the documentation."""
    report, cells, forks = found.machine, found.cells, found.forks
    on_gpu = report.get("device", "cpu") != "cpu"
    parts = [_INTRODUCTION if not on_gpu else _INTRODUCTION_GPU]
    for gib in sorted({cell.gib for cell in cells}):
        memory = "host memory" if on_gpu else "memory above the state"
        parts += [f"## {gib} GiB", _table([cell for cell in cells if cell.gib == gib], memory)]
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
    method = _METHOD.format(pause=report.get(PAUSE, "3.0"))
    parts += [method, _CAUTION_GPU if on_gpu else _CAUTION, "## Machine", machine]
    return "\n\n".join(parts) + "\n"


def _table(cells: list[Cell], memory: str) -> str:
    lines = [
        "| system | measured on | saves | stall, ms | stall of the first save, ms | time to durable, s "
        f"| training meanwhile | {memory}, GiB | state as at the call |",
        "|-|-|-|-|-|-|-|-|-|",
    ]
    for cell in cells:
        if not cell.samples or cell.first is None:
            continue
        training = cell.median("training")
        torn = sum(sample.torn for sample in [cell.first, *cell.samples])
        lines.append(
            f"| {SAVERS[cell.system][0]} | {cell.date} | {len(cell.samples)} "
            f"| {cell.median('stall') * 1000:.1f} | {cell.first.stall * 1000:.0f} "
            f"| {_durable(cell)} | {f'{training:.0%}' if training else '–'} "
            f"| {cell.highest('memory'):.1f} "
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
- *Memory* is the anonymous and shared memory of the process and its children on the host at the peak of a
  save, each page once, less a state that is there itself. The interpreter and torch are in it, pages of files
  are not.
- Between two saves are {pause} s for each GiB of the state. A job saves minutes apart; Checkpointer puts a
  state on the host into huge pages then, which takes it up to 3 s the first time, on a virtual machine.
- The save before the last one is removed before the next begins, so that each system has one older save on
  the disk. Before each save, twice the state's size of memory is touched and freed, since this virtual
  machine gives free memory back to its host.
- *State as at the call*: every save is loaded again and compared with what the state was when it was
  called.
- Muster's coordinator is a process of its own on SQLite. nvidia-resiliency-ext asks for a GPU, and its
  calls
  of `torch.cuda.synchronize` and `current_device` are replaced here; with CPU tensors it does not copy. For
  torch_checkpointing the wait for its staging is in the stall: before it, the state must not be changed."""

_CAUTION_GPU = """## What to keep in mind

- One run, one rank, one GPU. With one rank the wait for other ranks is not in it.
- The first save of each system gets and pins its host memory, and takes that long.
- No save can stall for less than the copy to the host takes, and a target below it cannot be met: until the
  copy has ended, the state must not be changed."""

_CAUTION = """## What to keep in mind

- One run on 2 cores and one disk. With one rank the wait for other ranks is not in it.
- Buffers of checks that were done in between may be in the memory of `Checkpointer(copy=True)`.
- The state is on the host. Another page has the figures of [a state on a GPU](saves-cuda.md).
- A checkpoint that was written past the page cache is read from the disk by the next load.
- Checkpointer's children write no checksums (CRC-32), which torch does not check when it loads. The others
  do. That is about half a second per GiB here."""
