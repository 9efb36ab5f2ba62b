"""A rank of a job that DeepSpeed trains and saves: ``FOLDER MODE STAGE WRITER TAG [WHO WHAT WHEN]``.

MODE is ``committed`` or ``plain``: with Muster's adapter, or without, the control; or ``endless``: committed,
until it is killed. STAGE is ZeRO's, WRITER ``default`` or ``decoupled``, TAG a name for all saves, or
``steps`` for one each. Every life of the job but the first resumes. At the third save of a life rank WHO does
WHAT (``kill``, ``raise``, ``stop``; ``writer``: its decoupled writer is killed) at WHEN: ``before`` the save,
``writing``, or ``after`` it has written.

Each step takes the same from each weight, and so a life sees whether those it has loaded are of one step.
"""

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch

from muster.worker.errors import BarrierAbortedError, MusterError
from muster.worker.integrations.deepspeed import commit_together
from tests.support.jobs import fault
from tests.support.jobs.fault import ENDLESS, FAULTY, SAVES

WEIGHTS = 8


def strike(what: str, engine: Any) -> None:
    """Let it go wrong."""
    if what == "writer":
        process = engine.checkpoint_engine.ckpt_process
        process.kill()
        process.join()
        return
    fault.strike(what)


def doom(engine: Any, what: str, when: str) -> None:
    """Let it go wrong at a moment of the save."""
    writer = engine.checkpoint_engine
    theirs: Callable[..., Any] = writer.save

    def ours(*arguments: object, **options: object) -> None:
        if when == "after":
            theirs(*arguments, **options)
        strike(what, engine)

    writer.save = ours


def made(stage: int, writer: str) -> Any:
    """An engine, of a model whose weights are 0."""
    # Torchrun gives the first, and mpirun what DeepSpeed's decoupled writer asks for.
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    if writer == "decoupled":  # It refuses to load what it has itself written, otherwise.
        os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    # What DeepSpeed would compile for itself, for a minute or more.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=20), verbose=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if writer == "decoupled":
        config["checkpoint"] = {"writer": {"type": "python", "decoupled": True}}
    model = torch.nn.Linear(WEIGHTS, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def train(engine: Any) -> None:
    """A step, which takes the same from each weight."""
    engine.backward(engine(torch.ones(WEIGHTS)).sum())
    engine.step()


def are_of_one_step(engine: Any) -> bool:
    """Whether the weights are, of which each rank holds a part."""
    with torch.no_grad():
        return len({round(float(score), 3) for score in engine(torch.eye(WEIGHTS))}) == 1


def main() -> None:
    """Resume, train and save; print a line of each."""
    folder, mode, stage, writer, tag = sys.argv[1:6]
    who, what, when = sys.argv[6:] or ("none", "", "")
    torch.set_num_threads(1)
    engine = made(int(stage), writer)
    try:
        if mode != "plain":
            commit_together(engine)
        start = 0
        if os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            _, client_state = engine.load_checkpoint(folder)
            start = client_state["step"] if client_state else 0
            print("resumed", start, flush=True)
        for save in range(1, (ENDLESS if mode == "endless" else SAVES) + 1):
            step = start + save
            train(engine)
            if not are_of_one_step(engine):
                print("mixed", step, flush=True)
            if save == FAULTY and os.environ["RANK"] == who:
                if when == "before":
                    strike(what, engine)
                else:
                    doom(engine, what, when)
            name = None if tag == "steps" else tag
            try:
                engine.save_checkpoint(folder, tag=name, client_state={"step": step})
            except MusterError as error:
                print("failed", step, *str(error).split(), flush=True)
                if not isinstance(error, BarrierAbortedError):
                    raise  # Whoever is lost will not train on.
                vars(engine.checkpoint_engine).pop("save", None)
            else:
                print("saved", step, flush=True)
    finally:
        engine.destroy()
    print("latest", (Path(folder) / "latest").read_text(), flush=True)


if __name__ == "__main__":
    main()
