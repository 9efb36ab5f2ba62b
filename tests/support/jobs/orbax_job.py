"""A process of a job that trains with JAX and saves with Orbax: the arguments of :mod:`.job`.

MODE may also be ``checkpointer``: with Muster's barrier, and an ``AsyncCheckpointer`` of no manager. The
weights, of which each process has its part, are the number of the step that made them. A process whose save
failed goes on from the last checkpoint.
"""

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint._src.futures.future import ChainedFuture

from muster.worker.errors import MemberLostError, MusterError
from muster.worker.integrations.orbax import barrier_sync_fn
from tests.support.jobs.fault import SAVES, Fault
from tests.support.jobs.job import Arguments, Job, say

SHORT = 6
"""Seconds that a save of the control waits."""


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


class OrbaxJob(Job):
    """Saves weights that are sharded over the processes."""

    FAILURES = (Exception,)

    def __init__(self, given: Arguments) -> None:
        super().__init__(given)
        options = ocp.AsyncOptions(timeout_secs=60, barrier_sync_fn=barrier_sync_fn())
        if given.is_plain:
            options = ocp.AsyncOptions(timeout_secs=SHORT)
        self._saves = (Alone if given.mode == "checkpointer" else Managed)(given.folder, options)
        mesh = jax.make_mesh((given.world_size,), ("processes",))
        self._sharding = NamedSharding(mesh, PartitionSpec("processes"))

    def _weights_at(self, step: int) -> jax.Array:
        rows = 2 * self.given.world_size
        return jax.make_array_from_callback(
            (rows,), self._sharding, lambda place: np.full(rows, step, np.float32)[place]
        )

    def load(self) -> Sequence[object]:
        weights = self._saves.load(self._weights_at(0))
        mine = {float(number) for shard in weights.addressable_shards for number in np.asarray(shard.data)}
        self.step = int(min(mine))
        return [f"{number:g}" for number in mine]

    def last_step(self) -> int:
        return self.given.saves if self.given.mode == "endless" else SAVES * (1 + self.given.generation)

    def train(self) -> None:
        self._weights = self._weights_at(self.step)

    def save(self) -> None:
        self._saves.save(self.step, self._weights)

    def break_save(self, fault: Fault) -> None:
        """Strike where the thread of the save waits for what is written."""
        by = "_background_wait_for_commit_futures"
        fault.strike_in(ChainedFuture, "result", lambda: sys._getframe(2).f_code.co_name == by)

    def after_failure(self, error: BaseException) -> None:
        if isinstance(error, MemberLostError) or not isinstance(error, MusterError | OSError):
            raise error
        self.resume()

    def close(self) -> None:
        say("ended", self.step)


def main() -> None:
    """Resume, and train."""
    given = Arguments.read()
    jax.distributed.initialize(f"127.0.0.1:{os.environ['MASTER_PORT']}", given.world_size, given.rank)
    OrbaxJob(given).run()


if __name__ == "__main__":
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # JAX would wait for who is lost.
