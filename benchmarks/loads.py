"""Measure loads side by side: Muster with and without verification, torch's dcp.load, and the peers.

Run it from the root of the repository: `python -m benchmarks.loads`, on a GPU with `--device cuda`.
"""

import itertools
import json
import multiprocessing as mp
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nvidia_resiliency_ext.checkpointing.async_ckpt.cached_metadata_filesystem_reader import (
    CachedMetadataFileSystemReader,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.measuring.arguments import parser_of
from benchmarks.measuring.machine import describe_machine, describe_versions
from benchmarks.peers.saves import TorchCheckpointing
from benchmarks.saving.floors import expect
from lab.processes.coordinator import Coordinator
from muster.worker.saves import Checkpointer

GIB = 2**30
MIB = 2**20
STEP = 1
SPAWN = mp.get_context("spawn")
GIVE_UP = 600.0
"""Seconds that preparing or measuring one cell may take."""

State = dict[str, torch.Tensor]


@dataclass
class Cell:
    """One way to load at one size."""

    system: str
    gib: int
    saved_by: int
    """The number of ranks that saved; one rank loads."""
    tensor_mib: int
    """MiB of each tensor of the state."""
    memory: list[int] = field(default_factory=list)
    """Bytes that the first load of each process took beside the state, at most."""
    cached: list[float] = field(default_factory=list)
    """Seconds of each load from the page cache."""
    cold: list[float] = field(default_factory=list)
    """Seconds of each load from the disk."""
    failure: str = ""


# ---------------------------------------------------------------------- states and loads


def _layers(gib: int, tensor_mib: int) -> range:
    return range(gib * GIB // (tensor_mib * MIB))


def _empty(cell: Cell, device: str) -> State:
    length = cell.tensor_mib * MIB // 4
    layers = _layers(cell.gib, cell.tensor_mib)
    return {f"layer-{number}": torch.zeros(length, device=device) for number in layers}


def _prepare(rank: int, world_size: int, gib: int, tensor_mib: int, folder: Path) -> None:
    """One rank of a job that saves a state, sharded if there are several."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    state: dict[str, torch.Tensor | DTensor] = {}
    mesh = init_device_mesh("cpu", (world_size,))
    for number in _layers(gib, tensor_mib):  # One by one: two whole states need not fit into memory.
        tensor = torch.full((tensor_mib * MIB // 4,), float(number))
        state[f"layer-{number}"] = distribute_tensor(tensor, mesh, [Shard(0)]) if world_size > 1 else tensor
    made = Checkpointer(folder / "muster")
    made.save(STEP, state)
    assert made.finalize(blocking=True) == [STEP]
    made.close()
    dcp.save(state, checkpoint_id=folder / "dcp")
    if world_size == 1:
        torch.save(state, folder / "plain.pt")
    dist.destroy_process_group()
    if world_size == 1:
        saver = TorchCheckpointing(folder)
        saver.save(STEP, {name: tensor for name, tensor in state.items()})
        while not saver.done():
            time.sleep(0.1)
        saver.close()


def _muster(folder: Path, verify: str) -> Callable[[State], object]:
    made = Checkpointer(folder / "muster", verify=verify)  # type: ignore[arg-type]
    return made.resume


def _peer(folder: Path) -> Callable[[State], object]:
    saver = TorchCheckpointing(folder)

    def load(state: State) -> None:
        found = saver.load(STEP, state)
        for name, tensor in state.items():
            if found[name] is not tensor:
                tensor.copy_(found[name])

    return load


def _plain(folder: Path) -> Callable[[State], object]:
    def load(state: State) -> None:
        found = torch.load(folder / "plain.pt", weights_only=True)
        for name, tensor in state.items():
            tensor.copy_(found[name])

    return load


SYSTEMS: dict[str, tuple[str, Callable[[Path], Callable[[State], object]]]] = {
    "muster": ("Muster, verified", lambda folder: _muster(folder, "load")),
    "muster-off": ("Muster, verify=off", lambda folder: _muster(folder, "off")),
    "dcp": (
        "torch's dcp.load",
        lambda folder: lambda state: dcp.load(state, checkpoint_id=folder / "dcp"),
    ),
    "nvidia": (
        "dcp.load by nvidia-resiliency-ext's reader",
        lambda folder: (
            lambda state: dcp.load(state, storage_reader=CachedMetadataFileSystemReader(folder / "dcp"))
        ),
    ),
    "torch-checkpointing": ("torch_checkpointing", _peer),
    "plain": ("torch.load, as of nvidia-resiliency-ext's TorchAsyncCheckpoint", _plain),
}
"""By name: the title, and a function that makes a function that fills a state."""
RESHARDING = ("muster", "muster-off", "dcp", "nvidia")
"""The systems that also load what another number of ranks has saved."""


# ---------------------------------------------------------------------- measuring


def _drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def _memory(name: str) -> int:
    """Return an entry of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _load(cell: Cell, device: str, folder: Path, pipe: Connection) -> None:
    """A process that loads once for each word it gets."""
    warnings.simplefilter("ignore")
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    try:
        state = _empty(cell, device)
        load = SYSTEMS[cell.system][1](folder)
        before = _memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # The highest size counts from now on.
        load(state)
        peak = _memory("VmHWM") - before
        for number, tensor in enumerate(state.values()):
            assert float(tensor[0]) == float(tensor[-1]) == number, "it is not what was saved"
        pipe.send(peak)
        while pipe.recv():
            began = time.monotonic()
            load(state)
            synchronize()  # type: ignore[no-untyped-call]
            pipe.send(time.monotonic() - began)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def measure(
    gib: int,
    saved_by: int,
    tensor_mib: int,
    processes: int,
    repeats: int,
    device: str,
    folder: Path,
    endpoint: str,
) -> list[Cell]:
    """Measure all systems at one size, in turn."""
    os.environ |= {"MUSTER_ENDPOINT": endpoint, "MUSTER_RUN_ID": f"loads-{gib}-{saved_by}-{tensor_mib}"}
    ranks = [
        SPAWN.Process(target=_prepare, args=(rank, saved_by, gib, tensor_mib, folder))
        for rank in range(saved_by)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(GIVE_UP)
        if rank.exitcode != 0:
            raise RuntimeError(f"a rank that prepares {gib} GiB ended with {rank.exitcode}")
    for name in ("MUSTER_ENDPOINT", "RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    systems = SYSTEMS if saved_by == 1 else RESHARDING
    cells = [Cell(name, gib, saved_by, tensor_mib) for name in systems]
    for _ in range(processes):
        for cell in cells:
            if not cell.failure:
                _measure(cell, repeats, device, folder)
    for cell in cells:
        print(f"{gib} GiB of {saved_by}: {cell}", file=sys.stderr)
    return cells


def _measure(cell: Cell, repeats: int, device: str, folder: Path) -> None:
    """Measure one system in one process."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_load, args=(cell, device, folder, theirs), daemon=False)
    process.start()
    theirs.close()
    try:
        peak = expect(ours, GIVE_UP)
        if not isinstance(peak, int):
            raise RuntimeError(str(peak))
        cell.memory.append(peak)
        for number in range(2 * repeats):
            cold = number % 2 == 1
            if cold:
                _drop_cache(folder)
            ours.send(True)
            seconds = expect(ours, GIVE_UP)
            if not isinstance(seconds, float):
                raise RuntimeError(str(seconds))
            (cell.cold if cold else cell.cached).append(seconds)
        ours.send(False)
    except (RuntimeError, EOFError) as error:
        cell.failure = str(error) or type(error).__name__
    finally:
        process.join(10)
        process.kill()


# ---------------------------------------------------------------------- the report


def page(machine: dict[str, str], cells: list[Cell]) -> str:
    """Return the page for the documentation."""
    parts = [_TITLES[machine.get("device", "cpu")], _INTRODUCTION]
    for tensor_mib in sorted({cell.tensor_mib for cell in cells}):
        for saved_by, title in ((1, "same world size"), (2, "saved by two ranks, loaded by one")):
            these = [one for one in cells if (one.saved_by, one.tensor_mib) == (saved_by, tensor_mib)]
            if these:
                parts += [f"## Tensors of {tensor_mib} MiB, {title}", _table(these)]
    described = "\n".join(f"- {key}: {value}" for key, value in machine.items())
    return "\n\n".join([*parts, _METHOD, "## Machine", described]) + "\n"


def _table(cells: list[Cell]) -> str:
    lines = [
        "| system | GiB | from the page cache, s | beside dcp.load | from the disk, s | beside dcp.load "
        "| memory, MiB |",
        "|-|-|-|-|-|-|-|",
    ]
    for cell in cells:
        beside = next(one for one in cells if (one.system, one.gib) == ("dcp", cell.gib))
        if cell.failure:
            lines.append(f"| {SYSTEMS[cell.system][0]} | {cell.gib} | failed: {cell.failure[:80]} | | | | |")
            continue
        figures = []
        for own, theirs in ((cell.cached, beside.cached), (cell.cold, beside.cold)):
            median = statistics.median(own)
            figures += [
                f"{median:.2f} ({min(own):.2f}–{max(own):.2f})",
                f"{median / statistics.median(theirs):.2f} ×",
            ]
        figures.append(f"{statistics.median(cell.memory) / MIB:,.0f}")
        lines.append(f"| {SYSTEMS[cell.system][0]} | {cell.gib} | {' | '.join(figures)} |")
    return "\n".join(lines)


_TITLES = {"cpu": "# Loads beside the peers", "cuda": "# Loads to a GPU, beside the peers"}

_INTRODUCTION = """How long it takes to fill a state that is there, for Muster with its digests verified
and without, and for what else loads PyTorch state."""

_METHOD = """## How it was measured

One rank loads, in processes of its own for each system, in turn, into tensors that are there
already. The first load of a process is checked and not counted. Several processes load, since torch's own
loads take twice as long in some processes as in others: what they allocate for each tensor is either memory
that the process has, or new pages. Then loads from the page cache and from the disk alternate: before
the latter the files' pages are dropped. Figures are medians, with the lowest and the highest. Muster's loads
include its three meetings, here of one rank alone, without a coordinator. *Memory* is what
the first load of a process takes at most beside the state and all that the process had before. torch.load and
torch_checkpointing are given the copy into the state, which the others make by themselves."""


def main() -> int:
    """Run the benchmark; the exit status is 1 if any measurement failed."""
    parser = parser_of(__doc__)
    parser.add_argument("--gib", type=int, nargs="+", default=[1, 4, 8], help="sizes of the state")
    parser.add_argument(
        "--processes", type=int, default=3, help="processes of each system, one after another"
    )
    parser.add_argument("--repeats", type=int, default=3, help="loads of each kind in a process")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the state is")
    parser.add_argument("--saved-by", type=int, choices=[1, 2], nargs="+", default=[1, 2], help="ranks")
    parser.add_argument("--tensor-mib", type=int, nargs="+", default=[16, 512], help="of each tensor")
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results"), help="where to save")
    parser.add_argument("--output", type=Path, help="default: in benchmarks/results, by the device")
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    name = "loads" if arguments.device == "cpu" else f"loads-{arguments.device}"
    output = arguments.output or Path(f"benchmarks/results/{name}.json")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    about = {"date": datetime.now(UTC).date().isoformat(), "device": arguments.device}
    machine = about | describe_machine(arguments.folder) | describe_versions()
    cells: list[Cell] = []
    with (
        tempfile.TemporaryDirectory() as state,
        Coordinator(Path(state)) as coordinator,
        tempfile.TemporaryDirectory(prefix=".saves-", dir=arguments.folder) as scratch,
    ):
        for gib, tensor_mib in itertools.product(arguments.gib, arguments.tensor_mib):
            for saved_by in arguments.saved_by:
                folder = Path(scratch).resolve() / f"{gib}-{saved_by}"
                folder.mkdir()
                cells += measure(
                    gib,
                    saved_by,
                    tensor_mib,
                    arguments.processes,
                    arguments.repeats,
                    arguments.device,
                    folder,
                    coordinator.endpoint,
                )
                shutil.rmtree(folder)
                # Written after each, so that a run that is cut off keeps what it has measured.
                measured = {"machine": machine, "cells": [asdict(cell) for cell in cells]}
                output.write_text(json.dumps(measured, indent=1) + "\n")
                (arguments.docs / f"{name}.md").write_text(page(machine, cells))
    return int(any(cell.failure for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
