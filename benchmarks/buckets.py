"""Saves to a bucket side by side: Muster and ``torch.distributed.checkpoint`` with fsspec.

Run it from the root of the repository: ``python -m benchmarks.buckets``.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

import muster.worker
from benchmarks.measuring.machine import describe_machine
from lab.processes.bucket_server import BUCKET, BucketServer
from lab.processes.coordinator import Coordinator
from muster.worker import GrpcBarrier
from muster.worker.saves import Checkpointer

MIB = 2**20
PAGE = Path("docs/benchmarks/buckets.md")
State = dict[str, torch.Tensor]
Save = Callable[[int, State], Callable[[], None]]
"""Begins a save, by its number, and gives back what waits until it is done."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One save, in seconds."""

    stall: float
    durable: float


def of_muster(url: str, options: dict[str, Any], endpoint: str) -> Save:
    """A Checkpointer."""
    barrier = GrpcBarrier(0, 1, "save", endpoint, 20, 60, "benchmark", 0)
    made = Checkpointer(f"{url}/muster", keep_last=1, barrier=barrier, storage_options=options)

    def save(number: int, state: State) -> Callable[[], None]:
        made.save(number, dict(state))
        return lambda: wait_for(made, number)

    return save


def wait_for(made: Checkpointer, number: int) -> None:
    """Until it is committed."""
    assert made.finalize(blocking=True) == [number]


def of_torch(url: str, options: dict[str, Any], *, aside: bool) -> Save:
    """Torch's own, with its own writer."""

    def save(number: int, state: State) -> Callable[[], None]:
        writer = FsspecWriter(f"{url}/torch-{aside}-{number}", sync_files=False, **options)
        if not aside:
            dcp.save(state, storage_writer=writer)
            return lambda: None
        future: Any = dcp.async_save(state, storage_writer=writer)
        return lambda: future.result()

    return save


def measure(save: Save, mib: int, repeats: int) -> list[Sample]:
    """Save so often, after a first time that sets up what is kept."""
    state = {f"layer-{n}": torch.zeros(4 * MIB) for n in range(mib // 16)}
    samples = []
    for number in range(mib * 100, mib * 100 + repeats + 1):
        for tensor in state.values():
            tensor.add_(1)
        began = time.monotonic()
        wait = save(number, state)
        stall = time.monotonic() - began
        wait()
        samples.append(Sample(stall, time.monotonic() - began))
    return samples[1:]


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description="Saves to a bucket side by side.")
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder, BucketServer(Path(folder)) as server:
        store = f"file://{folder}/meeting"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        with Coordinator(Path(folder)) as coordinator:
            url, options = f"s3://{BUCKET}", server.options()
            systems = {
                "Muster, `Checkpointer`": of_muster(url, options, coordinator.endpoint),
                "torch, `async_save`": of_torch(url, options, aside=True),
                "torch, `save`": of_torch(url, options, aside=False),
            }
            for mib in given.mib:
                for system, save in systems.items():
                    samples = measure(save, mib, given.repeats)
                    stall, durable = (
                        statistics.median(getattr(one, name) for one in samples)
                        for name in ("stall", "durable")
                    )
                    rows.append(f"| {mib} MiB | {system} | {stall * 1000:.0f} ms | {durable:.2f} s |")
                    print(rows[-1], flush=True)
            muster.worker.close()
        dist.destroy_process_group()
    PAGE.write_text(page(rows, given.repeats))


def page(rows: list[str], repeats: int) -> str:
    """The page of the documentation."""
    machine = describe_machine(Path(tempfile.gettempdir()))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "s3fs", "moto"))
    lines = [
        "# Saves to a bucket",
        "",
        f"Measured on {datetime.now(UTC):%Y-%m-%d} by `python -m benchmarks.buckets`, with {versions}: "
        f"{machine['processor']}, {machine['cores']} cores. The server that speaks S3 is written in Python, "
        "for tests, and shares these cores with the one rank that saves: take the order with you, and leave "
        "the figures here.",
        "",
        f"Medians of {repeats} saves after a first one. *Stall*: the training thread waits. *Durable*: from "
        "the call until it is committed, with Muster, or until all objects are there, with torch, which has "
        "no more to say.",
        "",
        "| State | | stall | durable |",
        "|-|-|-|-|",
        *rows,
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
