"""What a barrier is for: one program, run without a barrier and with each of three.

    python examples/with_and_without_barrier.py --barrier none
    python examples/with_and_without_barrier.py --barrier grpc

In every repetition each rank works for a while, writes "phase 1 done" to a log that all ranks share, meets
the others at the barrier, and writes "phase 2 started". Phase 1 means "my part of the checkpoint is
written", and phase 2 "I believe that the checkpoint is complete". If the log has a phase 2 above another
rank's phase 1, that rank believed in a checkpoint that was not complete.

The ranks start level and their work is of uneven length, so that without a barrier the phases are certain to
interleave: the quick rank is in phase 2 while the slow one is at work. The quick rank changes from one
repetition to the next. With a barrier phases never interleave. The program checks what it saw.
"""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, synchronize
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, spawn

from muster.worker.barriers import Barrier, BarrierConfig, create_barrier_from_config

KINDS = ("none", "dist_barrier", "tcp_store", "grpc")
TIMEOUT_SECS = 60
STEP_SECS = 0.01


@dataclass(frozen=True)
class Settings:
    """What every rank has to know."""

    kind: str
    ranks: int
    repetitions: int
    address: str
    """Where the ranks meet; it has another meaning for each kind of barrier."""
    run_id: str
    log: Path


def barrier_config(settings: Settings, rank: int) -> BarrierConfig:
    """Which barrier to build. Between tcp_store and grpc only the type and the address differ."""
    common: dict[str, Any] = {
        "global_rank": rank,
        "global_world_size": settings.ranks,
        "barrier_prefix": "checkpoint",
        "timeout_barrier_init_secs": TIMEOUT_SECS,
        "timeout_secs": TIMEOUT_SECS,
    }
    if settings.kind == "tcp_store":
        host, port = settings.address.split(":")
        where = {"master_address": host, "tcpstore_port": port, "use_checkpoint_barrier_tcpstore_libuv": True}
        return BarrierConfig(barrier_type="tcp_store", barrier_args=common | where)
    if settings.kind == "grpc":
        where = {"endpoint": settings.address, "run_id": settings.run_id}
        return BarrierConfig(barrier_type="grpc", barrier_args=common | where)
    if settings.kind == "dist_barrier":
        return BarrierConfig(barrier_type="dist_barrier")
    return BarrierConfig()


def run_rank(rank: int, settings: Settings, together: synchronize.Barrier) -> None:
    """The program of one rank."""
    if settings.kind == "dist_barrier":
        where = f"tcp://{settings.address}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=settings.ranks)
    barrier = create_barrier_from_config(barrier_config(settings, rank))
    # Else without a barrier we would only see which process was the first to have started.
    together.wait(TIMEOUT_SECS)
    for repetition in range(settings.repetitions):
        run_phases(repetition, rank, settings, barrier)
    # Rank 0 hosts the store of tcp_store, and gloo connects the ranks with each other: one that left while
    # others are still in the last barrier could make it fail. The grpc barrier needs no such care.
    together.wait(TIMEOUT_SECS)
    if dist.is_initialized():
        dist.destroy_process_group()


def run_phases(repetition: int, rank: int, settings: Settings, barrier: Barrier | None) -> None:
    """One repetition: work, phase 1, the barrier if there is one, phase 2."""
    time.sleep((rank + repetition) % settings.ranks * STEP_SECS)
    write_line(settings.log, f"repetition {repetition}, rank {rank}: phase 1 done")
    if barrier is not None:
        barrier.execute_barrier()
    write_line(settings.log, f"repetition {repetition}, rank {rank}: phase 2 started")


def write_line(log: Path, line: str) -> None:
    """Append in one write, so that the lines of different processes do not mix."""
    with log.open("ab", buffering=0) as file:
        file.write(f"{line}\n".encode())


def check(settings: Settings) -> bool:
    """Read the log, say what is in it, and whether it is what this kind of barrier promises."""
    repetitions = read_log(settings)
    if any(len(set(lines)) != 2 * settings.ranks for lines in repetitions):
        print("FAILED: the log is not complete, so it shows nothing.")
        return False
    interleaved = [lines for lines in repetitions if is_interleaved(lines)]
    print("From the log:", *(interleaved or repetitions)[0], sep="\n  ")
    print(
        f"\nBarrier {settings.kind}: in {len(interleaved)} of {settings.repetitions} repetitions "
        "a rank started phase 2 before every rank was done with phase 1."
    )
    as_expected = bool(interleaved) == (settings.kind == "none")
    promise = "without a barrier some must" if settings.kind == "none" else "with a barrier none may"
    print(f"{'As expected' if as_expected else 'FAILED'}: {promise}.")
    return as_expected


def read_log(settings: Settings) -> list[list[str]]:
    """The lines of each repetition, in the order in which they were written."""
    lines = settings.log.read_text().splitlines()
    starts = [f"repetition {number}," for number in range(settings.repetitions)]
    return [[line for line in lines if line.startswith(start)] for start in starts]


def is_interleaved(lines: list[str]) -> bool:
    """Whether some phase 2 stands above some phase 1."""
    phases = [line.partition("phase ")[2] for line in lines]
    return phases != sorted(phases)


@contextmanager
def meeting_place(kind: str, endpoint: str | None) -> Iterator[str]:
    """An address for the ranks to meet at; for grpc, that of a coordinator which runs meanwhile."""
    if kind == "grpc" and endpoint:
        yield endpoint
    elif kind == "grpc":
        with coordinator() as address:
            yield address
    else:
        yield free_address()


@contextmanager
def coordinator() -> Iterator[str]:
    """Run a coordinator of our own, and return its address."""
    muster = Path(sys.executable).with_name("muster")
    for _ in range(3):
        address = free_address()
        command = [str(muster), "serve", "--listen", address, "--http", free_address(), "--state", "memory:"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                if answers(address, process):
                    yield address
                    return
            finally:
                process.terminate()
    sys.exit(f"{muster} serve does not start. Run it by hand to see why.")


def answers(address: str, process: "subprocess.Popen[bytes]") -> bool:
    """Wait until the coordinator listens. False: it ended, since another program has taken a port of its."""
    host, _, port = address.rpartition(":")
    while process.poll() is None:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return True
        time.sleep(0.1)
    return False


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What goes wrong without a barrier, and not with one.")
    parser.add_argument("--barrier", choices=KINDS, default="grpc", help="default: grpc")
    parser.add_argument("--ranks", type=int, default=4, help="processes, at least 2; default: 4")
    parser.add_argument("--repetitions", type=int, default=20, help="default: 20")
    parser.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        default=os.environ.get("MUSTER_ENDPOINT"),
        help="the coordinator for grpc; default: MUSTER_ENDPOINT, else one is started for this run",
    )
    arguments = parser.parse_args()
    if arguments.ranks < 2 or arguments.repetitions < 1:
        parser.error("it takes 2 ranks and 1 repetition to see anything")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as folder, meeting_place(arguments.barrier, arguments.endpoint) as at:
        run_id, log = f"example-{uuid.uuid4().hex[:8]}", Path(folder) / "log"
        settings = Settings(arguments.barrier, arguments.ranks, arguments.repetitions, at, run_id, log)
        together = get_context("spawn").Barrier(arguments.ranks)
        try:
            spawn(run_rank, args=(settings, together), nprocs=arguments.ranks)  # type: ignore[no-untyped-call]
        except ProcessException as error:
            print(f"FAILED: a rank ended early. {error}")
            return 1
        return 0 if check(settings) else 1


if __name__ == "__main__":
    sys.exit(main())
