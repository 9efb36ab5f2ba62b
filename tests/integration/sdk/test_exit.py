"""A process that has finished ends, whatever gRPC's threads do then."""

import os
import subprocess
import sys
from pathlib import Path

from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator

SLOW_EXIT = Path(__file__).parents[2] / "support" / "jobs" / "slow_exit.py"


def test_rank_ends_although_a_thread_of_grpc_holds_a_lock(coordinator: Coordinator):
    rank = {"MUSTER_ENDPOINT": coordinator.endpoint, "MUSTER_RUN_ID": "run", "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, str(SLOW_EXIT)],
        env=os.environ | rank,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr
