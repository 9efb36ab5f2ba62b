"""One rank of the job that ``make failover`` watches: it trains, saves, and meets the others at a barrier.

It prints what happens as lines of JSON. At each gate rank 1 is late until a file says go: rank 0 waits.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from muster.worker import Checkpointer, GrpcBarrier

SAVE_EVERY = 10
GATE_EVERY = 40
STEP_SECONDS = 0.05


def main() -> None:
    """Train until a file says that it is enough."""
    folder = Path(sys.argv[1])
    rank = int(os.environ["RANK"])

    def tell(kind: str, step: int, seconds: float = 0.0) -> None:
        print(json.dumps({"rank": rank, "kind": kind, "step": step, "seconds": seconds}), flush=True)

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    checkpointer = Checkpointer(folder / "checkpoints", keep_last=2)
    gate = GrpcBarrier(barrier_prefix="gate")
    weight = torch.zeros(1000)
    begun: dict[int, float] = {}
    step, enough = 0, torch.zeros(1)
    while not enough:
        step += 1
        time.sleep(STEP_SECONDS)  # It stands for the work.
        weight += 1
        dist.all_reduce(weight, dist.ReduceOp.AVG)
        if step % SAVE_EVERY == 0:
            begun[step] = time.monotonic()
            checkpointer.save(step, {"weight": weight})
        for saved in checkpointer.finalize():
            tell("committed", saved, time.monotonic() - begun[saved])
        if step % GATE_EVERY == 0:
            go = folder / f"go-{step}"
            tell("at the gate", step)
            while rank == 1 and not go.exists():
                time.sleep(0.01)
            began = time.monotonic()
            gate.execute_barrier()
            tell("through the gate", step, time.monotonic() - began)
        enough = torch.tensor([float((folder / "enough").exists())])
        dist.all_reduce(enough, dist.ReduceOp.MAX)
    for saved in checkpointer.finalize(blocking=True):
        tell("committed", saved, time.monotonic() - begun[saved])
    checkpointer.close()
    tell("done", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
