"""A process of a job that trains with JAX and saves with Orbax: ``FOLDER MODE [WHO WHAT WHEN]``.

MODE is ``committed`` or ``plain``, with Muster's barrier or with JAX's own, the control; or ``checkpointer``:
with Muster's, and an ``AsyncCheckpointer`` of no manager; or ``endless``: committed, until it is killed. The
weights, of which each process has its part, are the number of the step that made them. Each step is saved.
Every life of the job but the first resumes. At the third save process WHO does WHAT (``kill``, ``raise``) at
WHEN: ``before`` the save, ``writing``, or ``after`` it has written. A process whose save failed goes on
from the last checkpoint.
"""

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.futures.future import ChainedFuture

from muster.worker.errors import MemberLostError, MusterError
from muster.worker.integrations.orbax import barrier_sync_fn
from tests.support.jobs.fault import FAULTY, SAVES, strike

SHORT = 6
"""Seconds that a save of the control waits."""


def doom(what: str, when: str) -> None:
    """Let it go wrong once, where the thread of the third save waits for what is written."""
    theirs: Any = ChainedFuture.result
    saves = iter(range(1, FAULTY + 1))

    def ours(*arguments: Any, **named: Any) -> Any:
        by = sys._getframe(1).f_code.co_name
        due = by == "_background_wait_for_commit_futures" and next(saves) == FAULTY
        if due:
            ChainedFuture.result = theirs
            if when == "writing":
                strike(what)
        written = theirs(*arguments, **named)
        if due:
            strike(what)
        return written

    ChainedFuture.result = ours


class Managed:
    """Saves by a manager."""

    def __init__(self, folder: Path, options: ocp.AsyncOptions) -> None:
        self._manager = ocp.CheckpointManager(
            folder, options=ocp.CheckpointManagerOptions(async_options=options, max_to_keep=2)
        )

    def save(self, step: int, weights: jax.Array) -> None:
        self._manager.save(step, args=ocp.args.StandardSave({"weights": weights}))
        self._manager.wait_until_finished()

    def load(self, like: jax.Array) -> jax.Array:
        self._manager.reload()
        loaded = self._manager.restore(
            self._manager.latest_step(), args=ocp.args.StandardRestore({"weights": like})
        )
        weights: jax.Array = loaded["weights"]
        return weights


class Alone:
    """Saves by a checkpointer."""

    def __init__(self, folder: Path, options: ocp.AsyncOptions) -> None:
        self._folder = folder
        self._checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler(), async_options=options)

    def save(self, step: int, weights: jax.Array) -> None:
        self._checkpointer.save(
            self._folder / str(step), args=ocp.args.StandardSave({"weights": weights}), force=True
        )
        self._checkpointer.wait_until_finished()

    def load(self, like: jax.Array) -> jax.Array:
        last = max(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())
        loaded = self._checkpointer.restore(
            self._folder / str(last), args=ocp.args.StandardRestore({"weights": like})
        )
        weights: jax.Array = loaded["weights"]
        return weights


def main() -> None:
    """Resume, and train."""
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    who, what, when = sys.argv[3:] or ("none", "", "")
    life, world, rank = (
        int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "RANK")
    )
    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", world, rank)
    options = ocp.AsyncOptions(timeout_secs=60, barrier_sync_fn=barrier_sync_fn())
    if mode == "plain":
        options = ocp.AsyncOptions(timeout_secs=SHORT)
    saves = (Alone if mode == "checkpointer" else Managed)(folder, options)
    sharding = NamedSharding(jax.make_mesh((world,), ("processes",)), PartitionSpec("processes"))

    def made(step: int) -> jax.Array:
        return jax.make_array_from_callback(
            (2 * world,), sharding, lambda place: np.full(2 * world, step, np.float32)[place]
        )

    def resume() -> int:
        weights = saves.load(made(0))
        mine = {float(number) for shard in weights.addressable_shards for number in np.asarray(shard.data)}
        print("resumed", *(f"{number:g}" for number in mine), flush=True)
        return int(min(mine))

    step = resume() if life else 0
    if str(rank) == who and when != "before":
        doom(what, when)
    while mode == "endless" or step < SAVES * (1 + life):
        step += 1
        try:
            if (step, str(rank), when) == (FAULTY, who, "before"):
                strike(what)
            saves.save(step, made(step))
        except Exception as error:
            print("failed", type(error).__name__, *str(error).split(), flush=True)
            if isinstance(error, MemberLostError) or not isinstance(error, MusterError | OSError):
                raise
            step = resume()
        else:
            print("saved", step, flush=True)
    print("ended", step, flush=True)


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # JAX would wait for who is lost.
