"""Two thousand ranks, each with a session of its own, against one coordinator."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator

pytestmark = pytest.mark.also_through_relay

RANKS = 2_000
PROCESSES = 4
BARRIERS = 3


def test_two_thousand_ranks_meet(tmp_path: Path):
    share = RANKS // PROCESSES
    # Two busy cores are shared by all; nobody must be taken for dead while its process waits for a core.
    with Coordinator(tmp_path, session_ttl=60.0) as coordinator:
        crowds = [
            subprocess.Popen(
                [sys.executable, "-m", "lab.crowd", coordinator.endpoint]
                + [str(n) for n in (first, share, RANKS, BARRIERS)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for first in range(0, RANKS, share)
        ]
        outputs = [crowd.communicate(timeout=2 * PATIENCE) for crowd in crowds]
        assert [crowd.returncode for crowd in crowds] == [0] * PROCESSES, outputs
        heard = [json.loads(output) for output, _ in outputs]
        assert all(one == heard[0] for one in heard)
        for sequence in range(BARRIERS):
            (line,) = heard[0][str(sequence)]
            assert line.startswith("OUTCOME_RELEASED")
            assert f"{RANKS} of {RANKS} arrived" in line
        status, metrics = coordinator.get("/metrics")
        assert status == 200
        assert (
            f'muster_barrier_decisions_total{{outcome="RELEASED",prefix="all",run="crowd"}} {BARRIERS}.0'
            in metrics
        )
