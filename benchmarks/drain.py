"""How long a job takes to end well when one of its nodes is drained: ``python -m benchmarks.drain``.

Four agents of torchrun with a rank each train with a state of 1 GiB, on one machine; one agent has SIGTERM,
as a pod that is to end has. All ranks agree on a step, save there, and leave. What counts is the time until
the drained agent is gone: Kubernetes kills it after ``terminationGracePeriodSeconds``, 30 by default.
"""

import argparse
import json
import signal
import subprocess
import tempfile
import time
from datetime import datetime
from pathlib import Path

from lab.drain import job, reported_steps
from lab.patience import PATIENCE, until
from lab.processes.coordinator import MUSTER, Coordinator
from muster.checkpoint.directory import CheckpointDirectory

RANKS = 4
GIB = 2**30
GRACE = 30.0
"""Seconds; the default of ``terminationGracePeriodSeconds`` (Kubernetes)."""


def main() -> None:
    """Measure, and print a line for each repeat."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="of each rank's state; all hold the same")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    print(f"{RANKS} agents with a rank each, a state of {arguments.gib:g} GiB; one agent has SIGTERM:")
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as folder:
            print(f"  {drained(Path(folder), arguments.gib)}", flush=True)


def drained(folder: Path, gib: float) -> str:
    """Drain one node of a job.

    Args:
        folder: for all that it leaves.
        gib: of its state.

    Returns:
        What became of it.
    """
    numbers = round(gib * GIB / 4)
    with (
        Coordinator(folder) as coordinator,
        job(coordinator.endpoint, folder, RANKS, numbers=numbers, grace=GRACE - 5.0) as (first, *_),
    ):
        until(lambda: len(reported_steps(folder, RANKS, "began")) == RANKS)
        time.sleep(2.0)  # Into its training.
        began = time.time()
        first.send_signal(signal.SIGTERM)
        until(lambda: coordinator.log("save.done"))
        first.wait(PATIENCE)
        ended = time.time() - began
        shown = subprocess.run(
            [str(MUSTER), "describe", "run", "job", "-o", "json", f"--endpoint={coordinator.endpoint}"],
            capture_output=True,
            text=True,
            check=True,
        )
        save = json.loads(shown.stdout)["run"]["save"]
    saved = reported_steps(folder, RANKS, "saved")
    last = CheckpointDirectory(folder / "checkpoints").latest()
    assert last is not None
    assert saved == [last.step] * RANKS, saved
    asked, done = (datetime.fromisoformat(save[at]).timestamp() - began for at in ("asked_at", "ended_at"))
    return (
        f"asked for after {asked:.2f} s, saved by all at step {last.step} after {done:.1f} s, "
        f"the agent was gone after {ended:.1f} s"
    )


if __name__ == "__main__":
    main()
