"""Torchrun's agents of a job that is told to end, one for each of its ranks."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.patience import PATIENCE
from lab.processes.torchrun import agents

PROGRAM = Path(__file__).with_name("drained.py")
NUMBERS = 1000
"""Size of a state that takes no time to save."""


@contextmanager
def job(
    endpoint: str,
    folder: Path,
    ranks: int,
    mode: str = "point",
    run: str = "job",
    numbers: int = NUMBERS,
    grace: float = PATIENCE,
) -> Iterator[list[subprocess.Popen[Any]]]:
    """Start a job; at the end it is ended.

    Args:
        endpoint: the coordinator's.
        folder: for all that the processes leave.
        ranks: how many; each has an agent.
        mode: as of the program.
        run: the run's id.
        numbers: as of the program.
        grace: seconds that torch's agents give their workers when they are ended.
    """
    arguments = [
        *("--rdzv-backend=muster", f"--rdzv-id={run}"),
        *(f"--rdzv-endpoint={endpoint}", f"--nnodes={ranks}", "--nproc-per-node=1"),
        *("--local-addr=127.0.0.1", str(PROGRAM), str(folder), mode, str(numbers)),
    ]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{grace:.0f}",
    }
    with agents(arguments, [environment] * ranks, folder / "agents.log") as started:
        yield started


def reported_steps(folder: Path, ranks: int, what: str) -> list[int]:
    """At which steps ranks did something, in order of rank."""
    found = []
    for rank in range(ranks):
        path = folder / f"rank-{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        found += [int(line.split()[1]) for line in lines if line.split()[0] == what]
    return found
