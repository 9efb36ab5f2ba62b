"""The default barrier of a process, with its rank and world size."""

import os
import time
from collections.abc import Mapping
from typing import cast

import torch.distributed as dist

from muster.client import launchers
from muster.worker import environment
from muster.worker.barriers import GrpcBarrier
from muster.worker.errors import MusterError
from muster.worker.saves.local_barrier import LocalBarrier

STARTED = int(time.time())
"""The generation of a job that needs no coordinator. It differs in each life, so no new save has the name of
an unfinished one."""


def rank_and_world_size(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return this process's rank and the number of ranks.

    They come from ``RANK`` and ``WORLD_SIZE``, else from torch's process group, else from another launcher.
    Without any of these they are 0 and 1.

    Raises:
        EnvironmentValueError: a variable is not a number, or ``WORLD_SIZE`` is missing.
        MusterError: a launcher started several processes, and nothing says which of them this is.
    """
    if environ.get("RANK"):
        return environment.rank(None, environ), environment.world_size(None, environ)
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if launchers.find(environ) in launchers.OTHERS:
        return environment.rank(None, environ), environment.world_size(None, environ)
    for variable in (launcher.world_size for launcher in launchers.OTHERS):
        if environ.get(variable, "1") != "1":
            raise MusterError(
                f"{variable} = {environ[variable]}, and this process has no rank: it would save alone. Call "
                "torch.distributed.init_process_group first, or set RANK and WORLD_SIZE."
            )
    return 0, 1


def is_alone(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a job of its own, which needs no coordinator and names none."""
    return rank_and_world_size(environ)[1] == 1 and not environ.get("MUSTER_ENDPOINT")


def job_generation(environ: Mapping[str, str] = os.environ) -> int:
    """Return the job's generation: its life between two restarts."""
    return STARTED if is_alone(environ) else environment.generation(None, environ)


def job_barrier(prefix: str) -> GrpcBarrier:
    """Return the barrier of this job for a group.

    Raises:
        ConnectError: the coordinator could not be reached.
        RefusedError: it refused this process.
        EnvironmentValueError: the environment does not say where it is.
    """
    rank, world_size = rank_and_world_size()
    if is_alone():
        # It has all the methods that saves and loads call.
        return cast(GrpcBarrier, LocalBarrier(prefix, environment.run_id(None), STARTED))
    return GrpcBarrier(rank, world_size, prefix)
