r"""A small job of Transformers' Trainer whose checkpoints are committed by all ranks or by none.

It teaches a very small GPT-2 to write the licence text of this repository, byte by byte. If a rank is killed,
also while it saves, torchrun starts a new round, which goes on from the last checkpoint that was committed.
Start it on every node with

    torchrun --rdzv-backend=muster --rdzv-endpoint=HOST:7550 --rdzv-id=job1 --nnodes=4 --max-restarts=3 \
        examples/transformers_job.py FOLDER
"""

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from muster.worker.integrations.transformers import CommitCallback, agreed_latest

TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
CONTEXT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description="One rank of a small training job; start it by torchrun.")
    parser.add_argument("folder", type=Path, help="where the checkpoints go; all ranks share it")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    arguments = parser.parse_args()
    text = torch.tensor(list(TEXT.read_bytes()))
    pieces = text.unfold(0, CONTEXT, CONTEXT // 2)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=64,
            n_layer=2,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            str(arguments.folder),
            use_cpu=not torch.cuda.is_available(),  # Else the ranks are not joined without a GPU.
            max_steps=arguments.steps,
            save_steps=arguments.save_every,
            save_total_limit=2,
            logging_steps=arguments.save_every,
            disable_tqdm=True,
            report_to="none",
        ),
        train_dataset=[{"input_ids": piece, "labels": piece} for piece in pieces],
        callbacks=[CommitCallback()],  # Coordinator, run and round come from torchrun's environment.
    )
    last = agreed_latest(arguments.folder)
    if last is not None:
        print(f"rank {trainer.args.process_index} goes on from {last.name}", flush=True)
    trainer.train(resume_from_checkpoint=last is not None)


if __name__ == "__main__":
    main()
