"""Saves of ranks that no launcher has started: torch's process group says which rank each one is."""

from pathlib import Path

import pytest
from torch.multiprocessing.spawn import spawn

from lab.processes.coordinator import Coordinator
from muster.client import launchers
from tests.support.jobs.spawned_rank import STEP, save_and_load
from tests.support.saves.save_history import whole_checkpoint

RANKS = 2


def test_spawned_ranks_with_a_process_group_of_their_own_save_together(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for launcher in (launchers.TORCH, *launchers.OTHERS):
        monkeypatch.delenv(launcher.rank, raising=False)
        monkeypatch.delenv(launcher.world_size, raising=False)
    monkeypatch.setenv("MUSTER_ENDPOINT", coordinator.endpoint)
    monkeypatch.setenv("MUSTER_RUN_ID", "spawned")
    spawn(save_and_load, args=(RANKS, str(tmp_path)), nprocs=RANKS)  # Raises what a rank has raised.
    assert whole_checkpoint(tmp_path / "steps" / f"step-{STEP:010}", STEP) is None
    assert (tmp_path / "last" / "__1_0.distcp").exists()
