r"""A small job that DeepSpeed trains, whose checkpoints are committed by all ranks or by none.

Kill a rank of it while it runs: torchrun starts all ranks again, and they go on from the same step. Start
it by

    muster serve --state memory: &
    torchrun --rdzv-backend=muster --rdzv-endpoint=127.0.0.1:7550 --rdzv-id=job1 --nproc-per-node=2 \
        --max-restarts=9 examples/deepspeed_job.py FOLDER

It runs on GPUs, or without any (``DS_ACCELERATOR=cpu``: DeepSpeed then compiles a little when it first runs).
"""

import argparse
from pathlib import Path

import deepspeed
import torch

from muster.worker.errors import BarrierAbortedError
from muster.worker.integrations.deepspeed import commit_together

SAVE_EVERY = 20
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a small training job; start it by torchrun.")
    parser.add_argument("folder", type=Path, help="where the checkpoints go; all ranks share it")
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.manual_seed(7)
    deepspeed.init_distributed()
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    commit_together(engine)  # Coordinator, run and round come from torchrun's environment.

    engine.load_checkpoint(arguments.folder)
    if engine.global_steps:
        print(f"rank {engine.global_rank} goes on from step {engine.global_steps}", flush=True)
    while engine.global_steps < arguments.steps:
        batch = torch.randn(16, 32, device=engine.device)
        loss = (engine(batch).squeeze(1) - batch.sum(1)).square().mean()
        engine.backward(loss)
        engine.step()
        if engine.global_steps % SAVE_EVERY == 0:
            try:
                engine.save_checkpoint(arguments.folder)
            except BarrierAbortedError as error:  # On every rank, and all are there: the next may succeed.
                print(f"rank {engine.global_rank}, step {engine.global_steps}: {error}", flush=True)
            else:
                print(f"rank {engine.global_rank}, step {engine.global_steps}: committed", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
