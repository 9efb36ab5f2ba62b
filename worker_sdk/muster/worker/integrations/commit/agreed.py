"""All ranks resume from the same checkpoint, or none does."""

import logging
import os
from collections.abc import Callable, Set
from functools import partial
from pathlib import Path

from muster.checkpoint.committed import UncommittedError
from muster.worker.barriers import GrpcBarrier
from muster.worker.errors import MusterError
from muster.worker.integrations.commit.folders import Find, FolderSaves
from muster.worker.integrations.commit.lookup import given_name
from muster.worker.integrations.commit.numbered import NoneCommittedError
from muster.worker.saves.job_barrier import job_barrier
from muster.worker.saves.queue.queue import DEFAULT_TIMEOUT

logger = logging.getLogger(__name__)
PREFIX = "checkpoint/latest"
"""The group of the barriers at which ranks agree."""


def agree_on_newest(folder: Path, find: Find, barrier: GrpcBarrier | None = None) -> Path | None:
    """Return the checkpoint that rank 0 finds, on all ranks. All ranks must call it.

    Every other rank looks whether it sees the same. If there are only checkpoints that were not committed,
    rank 0 logs a warning. So no rank begins from scratch, or waits in a collective,
    while another one loads. A rank is waited for up to 20 minutes.

    Args:
        folder: where checkpoints have their names; all ranks share it.
        find: returns the newest checkpoint of the folder, without those given to it.
        barrier: of all ranks, and for nothing else; default: one of group ``checkpoint/latest``, of the ranks
            that the environment names, or else torch's process group.

    Returns:
        None if no rank finds a checkpoint.

    Raises:
        BarrierError: not all ranks have come, or one cannot look, or does not see the same; the message names
            the rank.
        CorruptCheckpointError: there are checkpoints, and all are damaged.
        MusterError: the ranks are out of step.
        UncommittedError: this rank does not see what rank 0 sees.
        RuntimeError: the checkpoint was replaced meanwhile.
        ConnectError: the coordinator could not be reached.
        OSError: this rank cannot look, or sees what rank 0 does not.
    """
    barrier = barrier or job_barrier(PREFIX)
    saves = FolderSaves(PREFIX, "latest", barrier, DEFAULT_TIMEOUT, "raise")
    found = partial(_committed, find, logger.warning if barrier.rank == 0 else logger.debug)
    newest = saves.choose_any(barrier, folder, found, verify=False, look=found)
    return newest if newest is None else given_name(newest)


def _committed(find: Find, log: Callable[[str, Exception], None], excluded: Set[Path]) -> Path | None:
    try:
        return find(excluded)
    except NoneCommittedError as error:
        log("%s", error)
    except UncommittedError:
        pass
    return None


def check_all_resume(
    rank: int, path: str | os.PathLike[str] | None, true_on_all: Callable[[bool], bool]
) -> None:
    """Check that all ranks have found a checkpoint, or none has. Otherwise those that load would hang.

    Args:
        rank: this one.
        path: the checkpoint that it has found.
        true_on_all: a collective of all ranks: whether a condition holds on each of them.

    Raises:
        MusterError: only some ranks have found one.
    """
    if not true_on_all(path is None) and not true_on_all(path is not None):
        raise MusterError(
            f"rank {rank} has {path or 'no checkpoint'} to resume from, and another rank has "
            f"{'one' if path is None else 'none'}. Mount the checkpoints' folder on all hosts."
        )
