"""Lets an engine of DeepSpeed's commit its checkpoints, if the adapter knows its calls."""

import os
from typing import Any, TypeVar, cast

from deepspeed import comm
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from muster.worker.barriers import GrpcBarrier
from muster.worker.integrations.commit import adopted
from muster.worker.integrations.commit.commitment import OnLost, check_save_settings
from muster.worker.integrations.commit.framework import check_signatures
from muster.worker.integrations.deepspeed.engine import EngineSaves
from muster.worker.saves.queue.queue import DEFAULT_TIMEOUT

TRIED = "DeepSpeed 0.19.8"
PREFIX = "checkpoint/deepspeed"
"""The group that decides saves."""
DECOUPLED = "DecoupledCheckpointEngine"
"""The one checkpoint engine that writes after the save has returned, and for which DeepSpeed's step waits."""

E = TypeVar("E")

_SIGNATURES = {
    "save_checkpoint": [
        "self", "save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters",
    ],
    "load_checkpoint": [
        "self", "load_dir", "tag", "load_module_strict", "load_optimizer_states", "load_lr_scheduler_states",
        "load_module_only", "custom_load_fn",
    ],
    "_commit_decoupled_checkpoint": ["self"],
    "destroy": ["self"],
    "load_universal_checkpoint": ["self"],
    "use_node_local_storage": ["self"],
}  # fmt: skip
check_signatures("deepspeed", DeepSpeedEngine, _SIGNATURES, TRIED)


def commit_together(
    engine: E,
    *,
    barrier: GrpcBarrier | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    on_lost: OnLost = "raise",
) -> E:
    """Let an engine commit its checkpoints by all ranks or by none.

    One line of a script is added, on all ranks::

        engine, *_ = deepspeed.initialize(...)
        engine = commit_together(engine)

    What ``save_checkpoint`` writes goes into a folder beside the tag's. When all ranks have written, rank 0
    gives it the tag's name and lets ``latest`` name it; a checkpoint of the same tag is replaced. If a rank
    fails, dies or does not come, all others hear who it was, and what was there before is still there, whole.
    ``load_checkpoint`` loads what was committed, and nothing else. All ranks must share the folder.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        barrier: decides the saves, and is for nothing else; default: one of group ``checkpoint/deepspeed``.
        timeout: seconds that a rank may take for its part of a save, and that it is waited for.
        on_lost: ``"abort"``: if a rank is lost or does not come in time, this process is aborted, since it
            may hang in a collective; default: the save raises, as far as it can.

    Returns:
        The same engine.

    Raises:
        ConnectError: the coordinator could not be reached.
        RefusedError: it refused this process.
        TypeError: it is no engine of DeepSpeed's for training.
        ValueError: it commits already, its ranks are not the barrier's, or its configuration leaves nothing
            that could be committed.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise TypeError(
            f"{type(engine).__name__} is no DeepSpeedEngine: give the first thing that deepspeed.initialize "
            "returned."
        )
    theirs = cast("Any", engine)
    if isinstance(getattr(theirs.save_checkpoint, "__self__", None), EngineSaves):
        raise ValueError("this engine commits its checkpoints already: leave out one commit_together(…).")
    check_save_settings(timeout, on_lost, barrier)
    _check_configuration(theirs)
    rank, world_size = comm.get_rank(), comm.get_world_size()
    barrier = barrier or GrpcBarrier(rank, world_size, PREFIX)
    if (barrier.rank, barrier.world_size) != (rank, world_size):
        raise ValueError(
            f"this process is rank {rank} of {world_size} of DeepSpeed, and rank {barrier.rank} of "
            f"{barrier.world_size} of the barrier. Give a barrier of DeepSpeed's ranks, or none."
        )
    saves = EngineSaves(theirs, barrier, timeout, on_lost)
    for name in ("save_checkpoint", "load_checkpoint", "_commit_decoupled_checkpoint", "destroy"):
        setattr(theirs, name, getattr(saves, name))
    return cast("E", engine)


def adopt(path: str | os.PathLike[str]) -> None:
    """Take a checkpoint for committed that was saved without :func:`commit_together`.

    To be called once, by one process, of a checkpoint that is known to be whole.

    Args:
        path: of the tag's folder.

    Raises:
        FileNotFoundError: there is no checkpoint of DeepSpeed's.
        FileExistsError: it is committed.
    """
    adopted.adopt(path, "DeepSpeed", "*model_states.pt", PREFIX)


def _check_configuration(engine: DeepSpeedEngine) -> None:
    if engine.use_node_local_storage():
        raise ValueError(
            "checkpoint.use_node_local_storage = true: each node would have a folder of its own, and no "
            "rename commits them all. Let all ranks share one."
        )
    writer = engine.checkpoint_engine
    if writer.is_decoupled() and (type(writer).__name__ != DECOUPLED or isinstance(engine, PipelineEngine)):
        raise ValueError(
            f"{type(engine).__name__} with {type(writer).__name__}: DeepSpeed does not wait there until its "
            f"writer has written. Take a {DECOUPLED} with a DeepSpeedEngine, or the default writer."
        )
