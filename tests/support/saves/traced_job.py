"""A job of one rank that saves twice, run as a script: FOLDER RANK WORLD_SIZE."""

import os
import sys

import torch
import torch.distributed as dist

from muster.worker.saves import Checkpointer

folder, rank, world_size, meeting = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
checkpointer = Checkpointer(folder)
for step in (1, 2):
    checkpointer.save(step, {"weight": torch.full((1024,), float(step))})
    print("saved", step, checkpointer.finalize(blocking=True), flush=True)
checkpointer.close()
dist.destroy_process_group()
