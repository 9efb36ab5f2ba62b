"""The code of Megatron and nvidia-resiliency-ext that saves, on Muster with only its import line changed."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from lab.processes import fork_client
from lab.processes.coordinator import Coordinator
from tests.support.saves.drop_in import CALLS

WORLD = 2
LONG = 4 * PATIENCE
"""Seconds: process after process that imports torch."""


@pytest.mark.timeout(3 * LONG)
@pytest.mark.parametrize("kind", ["fork", "persistent"])
def test_their_calls(kind: str, coordinator: Coordinator, tmp_path: Path):
    """Those of ``CALLS`` in tests/support/saves/drop_in.py."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    ranks = [
        fork_client.popen(
            [sys.executable, "-m", "tests.support.saves.drop_in", kind, str(rank), str(WORLD), str(folder)],
            spawns=True,
            env=os.environ
            | {
                "MUSTER_ENDPOINT": coordinator.endpoint,
                "MUSTER_RUN_ID": kind,
                "RANK": str(rank),
                "WORLD_SIZE": str(WORLD),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(WORLD)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=LONG)
            assert rank.returncode == 0, output
            assert output.count("well: ") == len(CALLS)
    finally:
        for rank in ranks:
            # With all that it has started, which holds the pipe as well.
            with suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
            rank.communicate()


ALONE = """
import sys, torch
from muster.worker import GrpcBarrier
from muster.worker.saves import TorchAsyncCheckpoint
from muster.worker.saves.queue import voter

voter.EARLY_WARNING = 0.2
how, path = sys.argv[1:]
barrier = GrpcBarrier(barrier_prefix="save-0", participants=[0]) if how == "alone" else None
checkpoint = TorchAsyncCheckpoint(barrier=barrier)
checkpoint.async_save({"weight": torch.ones(3)}, path)
checkpoint.finalize_async_save(blocking=True)
print("finalized", file=sys.stderr)
"""


@pytest.mark.parametrize("how", ["of all", "alone"])
def test_save_on_one_rank_soon_names_the_ranks_it_waits_for(
    how: str, coordinator: Coordinator, tmp_path: Path
):
    environment = {
        "MUSTER_ENDPOINT": coordinator.endpoint,
        "MUSTER_RUN_ID": how,
        "RANK": "0",
        "WORLD_SIZE": "2",
    }
    command = [sys.executable, "-c", ALONE, how, str(tmp_path / "0.pt")]
    rank = fork_client.popen(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True)
    watchdog = threading.Timer(100.0, rank.kill)
    watchdog.start()
    try:
        assert rank.stderr is not None
        said = []
        for line in rank.stderr:
            said.append(line)
            if "finalized" in line or "participants=[0]" in line:
                break
        if how == "alone":
            assert said[-1] == "finalized\n"
        else:
            assert 'barrier "save" #0 of run of all has waited' in said[-2]
            assert "missing: rank 1 (never joined)" in said[-2]
            assert 'own: barrier=GrpcBarrier(barrier_prefix="save-0", participants=[0])' in said[-1]
    finally:
        watchdog.cancel()
        rank.kill()
        rank.communicate()
