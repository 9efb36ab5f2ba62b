"""Generations of a job. Its ranks save through a framework's adapter, one process each."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator, free_port
from lab.processes.fork_client import TORCH, popen
from muster.worker.saves.writers.child import wait_readable

RANKS = 2
TRANSFORMERS = (
    *TORCH,
    "setuptools",
    "torch.onnx",
    "fsspec",
    "deepspeed",
    "transformers.trainer",
    "accelerate",
)
"""For what is built of these, or looks for them; and what they import at their first use."""
FRAMEWORKS = {
    "dcp_job": TORCH,
    "torchtitan_job": (
        *TORCH,
        "torch.onnx",
        "torchtitan.components.checkpointer",
        "torchtitan.distributed",
        "safetensors.torch",
    ),
    "deepspeed_job": TRANSFORMERS,
    "transformers_job": TRANSFORMERS,
    "accelerate_job": TRANSFORMERS,
    "sharded_job": TRANSFORMERS,
    "lightning_job": (*TORCH, "lightning"),
    "orbax_job": (),
}
"""What takes a program long to import; JAX has threads, and cannot be forked."""


class JobGeneration:
    """One generation of a job: its ranks, until they have ended.

    Args:
        coordinator: the job's.
        program: what each rank runs: a module of ``tests.support.jobs``.
        folder: the job's. The output of this generation goes into a folder in it.
        number: of the generation, from 0.
        *arguments: the program's.
    """

    def __init__(
        self, coordinator: Coordinator, program: str, folder: Path, number: int, *arguments: str
    ) -> None:
        self.folder = folder / f"generation-{number}"
        self.folder.mkdir()
        environment = os.environ | {
            "MUSTER_ENDPOINT": coordinator.endpoint,
            "MUSTER_RUN_ID": "job",
            "TORCHELASTIC_RESTART_COUNT": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(RANKS),
            "OMP_NUM_THREADS": "1",
        }
        self.ranks = []
        for rank in range(RANKS):
            with (
                (self.folder / f"rank-{rank}").open("w") as out,
                (self.folder / f"log-{rank}").open("w") as log,
            ):
                module, own = f"tests.support.jobs.{program}", environment | {"RANK": str(rank)}
                self.ranks.append(
                    popen(
                        [sys.executable, "-m", module, *arguments],
                        imports=FRAMEWORKS[program],
                        spawns=program == "deepspeed_job",
                        env=own,
                        start_new_session=True,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=log,
                    )
                )

    def end(self, *, but: int = -1) -> None:
        """Wait until its ranks have ended, but for one that is killed then."""
        for rank, process in enumerate(self.ranks):
            if rank != but:
                _end(process)
        if but >= 0:
            self.ranks[but].kill()
            _end(self.ranks[but])

    def wait_for_output(self) -> None:
        """Wait for its first word."""
        until(lambda: self.said(0), lambda: self.logged(0))

    def said(self, rank: int) -> list[str]:
        lines = (self.folder / f"rank-{rank}").read_text().splitlines()
        return [line for line in lines if not line.startswith("[Gloo]")]  # torch 2.9 writes there, too.

    def logged(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text()


def _end(process: "subprocess.Popen[Any]") -> None:
    """Wait for a rank, and end what it leaves: DeepSpeed's decoupled writer would stay for ever."""
    if process.returncode is None:
        handle = os.pidfd_open(process.pid)
        try:
            assert wait_readable(handle, PATIENCE), f"{process.args!r} goes on"
        finally:
            os.close(handle)
        os.killpg(process.pid, signal.SIGKILL)  # Nobody has waited for it yet: the number is still its own.
    process.wait()
