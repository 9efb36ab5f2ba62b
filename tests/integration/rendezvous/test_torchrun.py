"""Under torchrun the barrier takes endpoint, run, rank, world size and generation from the environment."""

import os
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator
from lab.processes.torchrun import torchrun

pytestmark = pytest.mark.also_through_relay

PROGRAM = """
import os, sys
from muster.worker import GrpcBarrier

barrier = GrpcBarrier(barrier_prefix="checkpoint", timeout_secs=60)
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert len(barrier.gather(b"x")) == 2
if restarts == 0 and barrier.rank == 1:
    sys.exit("this rank fails in its first generation")
barrier.execute_barrier()
print("rank", barrier.rank, "passed", barrier.sequence, "barriers", flush=True)
"""


def test_a_job_that_torchrun_restarts_goes_on_as_a_new_generation(coordinator: Coordinator, tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    arguments = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", str(script)]
    log = tmp_path / "torchrun.log"
    with log.open("w") as file:
        agent = torchrun(arguments, os.environ | {"MUSTER_ENDPOINT": coordinator.endpoint}, file)
    with agent:
        try:
            assert agent.wait(PATIENCE) == 0, log.read_text()
        finally:
            agent.kill()
    outcomes = [(line["sequence"], line["outcome"]) for line in coordinator.logged("barrier.decided", 3)]
    assert [sequence for sequence, _ in outcomes] == list(range(len(outcomes)))
    assert [outcome for _, outcome in outcomes if outcome == "RELEASED"] == ["RELEASED"] * 3
    assert coordinator.logged("generation.advanced")[0]["reason"].startswith("generation 1 takes over")
