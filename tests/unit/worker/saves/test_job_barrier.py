"""Rank and world size of a process that makes its own barrier."""

import pytest

from muster.client import launchers
from muster.worker.errors import MusterError
from muster.worker.saves.job_barrier import rank_and_world_size


def test_process_without_launcher_is_alone():
    assert rank_and_world_size({}) == (0, 1)
    # A batch script of Slurm is one process, whatever the job's size.
    assert rank_and_world_size({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}) == (0, 1)


@pytest.mark.parametrize("launcher", [launchers.TORCH, *launchers.OTHERS], ids=lambda one: one.name)
def test_rank_comes_from_the_launcher(launcher: launchers.Launcher):
    assert rank_and_world_size({launcher.rank: "1", launcher.world_size: "4"}) == (1, 4)


@pytest.mark.parametrize("launcher", launchers.OTHERS, ids=lambda one: one.name)
def test_one_of_several_processes_without_rank_may_not_save_alone(launcher: launchers.Launcher):
    with pytest.raises(MusterError, match=f"{launcher.world_size} = 4, and this process has no rank"):
        rank_and_world_size({launcher.world_size: "4"})
    assert rank_and_world_size({launcher.world_size: "1"}) == (0, 1)
