"""A small job that JAX trains, whose checkpoints Orbax finishes in all processes or in none.

Let the disk be full for one process: all learn which, and why, and train on. Kill one and start all
again: they go on from the same step. Start it by

    muster serve --state memory: &
    export MUSTER_ENDPOINT=127.0.0.1:7550 MUSTER_RUN_ID=job1 MUSTER_ROUND=0  # Count the starts.
    python examples/orbax_job.py FOLDER --processes 2 --process 0 &
    python examples/orbax_job.py FOLDER --processes 2 --process 1
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from muster.worker import MusterError
from muster.worker.integrations.orbax import barrier_sync_fn

SAVE_EVERY = 20


def descend(weights: jax.Array) -> jax.Array:
    """The weights after one step."""
    return weights - 0.1 * jax.grad(lambda w: jnp.square(w - 1.0).sum())(weights)


trained = jax.jit(descend)


def main() -> None:
    parser = argparse.ArgumentParser(description="One process of a small training job.")
    parser.add_argument("folder", type=Path, help="where the checkpoints go; all processes share it")
    parser.add_argument("--address", default="127.0.0.1:7600", help="of process 0, for JAX")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    jax.distributed.initialize(arguments.address, arguments.processes, arguments.process)

    saves = ocp.AsyncOptions(barrier_sync_fn=barrier_sync_fn())
    options = ocp.CheckpointManagerOptions(async_options=saves, max_to_keep=2)
    manager = ocp.CheckpointManager(arguments.folder.absolute(), options=options)
    sharding = NamedSharding(jax.make_mesh((jax.device_count(),), ("all",)), PartitionSpec("all"))
    weights = jax.jit(lambda: jnp.zeros(8 * jax.device_count()), out_shardings=sharding)()

    if (begun := manager.latest_step() or 0) > 0:
        weights = manager.restore(begun, args=ocp.args.StandardRestore({"weights": weights}))["weights"]
        print(f"process {arguments.process} goes on from step {begun}", flush=True)
    for step in range(begun + 1, arguments.steps + 1):
        weights = trained(weights)
        if step % SAVE_EVERY == 0:
            try:
                manager.save(step, args=ocp.args.StandardSave({"weights": weights}))
            except MusterError as error:  # Of the save before.
                print(f"process {arguments.process}: {error}", flush=True)
    manager.wait_until_finished()
    manager.close()


if __name__ == "__main__":
    main()
