"""The launchers that tell a process its rank, and the variables in which they say it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Launcher:
    """A program that starts the processes of a job.

    Args:
        name: for people.
        rank: the variable that holds the process's rank.
        world_size: the variable that holds the number of processes.
    """

    name: str
    rank: str
    world_size: str


TORCH = Launcher("torch", "RANK", "WORLD_SIZE")
OPEN_MPI = Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
PMI = Launcher("PMI", "PMI_RANK", "PMI_SIZE")
# Only a step of srun has this number. A batch script has SLURM_PROCID and the whole job's SLURM_NTASKS;
# but a batch script is one process, and no rank.
SLURM = Launcher("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
# An MPI launcher may be started by srun itself: then Slurm's variables say which of its daemons this is.
OTHERS = (OPEN_MPI, PMI, SLURM)
"""The launchers other than torch's, in the order in which they count."""

PMIX_JOB = "PMIX_NAMESPACE"
"""The name of an MPI job, another one at each start."""
SLURM_RESTARTS = "SLURM_RESTART_COUNT"
"""How often Slurm requeued the job. Slurm does not set it in the first life."""


def find(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher that says both rank and world size.

    Torch's variables win, also if one of the two is missing: the other one must not come from elsewhere.
    """
    if environ.get(TORCH.rank) or environ.get(TORCH.world_size):
        return TORCH
    return next((one for one in OTHERS if environ.get(one.rank) and environ.get(one.world_size)), None)


def slurm_job(environ: Mapping[str, str]) -> str:
    """Return the name of Slurm's job, which a requeued job keeps; empty outside Slurm."""
    if environ.get("SLURM_ARRAY_JOB_ID") and environ.get("SLURM_ARRAY_TASK_ID"):
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID", "")
