"""A rank of a job that DeepSpeed trains and saves: the arguments of :mod:`.job`, OWN: ``STAGE WRITER TAG``.

STAGE is ZeRO's, WRITER ``default`` or ``decoupled``, TAG a name for all saves, or ``steps`` for one each. The
fault strikes at the third save of each generation. WHAT may also be ``writer``: then the decoupled writer is
killed.

Each step takes the same from each weight. So a generation sees whether all loaded weights are of one step.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import deepspeed
import torch

from muster.worker.errors import BarrierAbortedError, MusterError
from muster.worker.integrations.deepspeed import commit_together
from tests.support.jobs.fault import FAULTY, Fault
from tests.support.jobs.job import Arguments, Job, say

WEIGHTS = 8


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


class DeepSpeedJob(Job):
    """Saves an engine.

    Args:
        given: the rank's arguments.
        engine: what it saves.
    """

    FAILURES = (MusterError,)

    def __init__(self, given: Arguments, engine: Any) -> None:
        super().__init__(given)
        self._engine = engine
        self._tag = given.own[2]

    def load(self) -> Sequence[object]:
        _, client_state = self._engine.load_checkpoint(str(self.given.folder))
        self.step = client_state["step"] if client_state else 0
        return [self.step]

    def faulty_step(self, first: int) -> int:
        return first + FAULTY

    def train(self) -> None:
        train(self._engine)
        if not are_of_one_step(self._engine):
            say("mixed", self.step)

    def save(self) -> None:
        tag = None if self._tag == "steps" else self._tag
        self._engine.save_checkpoint(str(self.given.folder), tag=tag, client_state={"step": self.step})

    def strike(self, fault: Fault) -> None:
        if fault.what == "writer":
            process = self._engine.checkpoint_engine.ckpt_process
            process.kill()
            process.join()
        else:
            fault.strike()

    def break_save(self, fault: Fault) -> None:
        fault.strike_in(self._engine.checkpoint_engine, "save")

    def after_failure(self, error: BaseException) -> None:
        if not isinstance(error, BarrierAbortedError):
            raise error  # A lost rank does not train on.


def main() -> None:
    """Resume, train and save; print a line of each."""
    given = Arguments.read(own=3)
    torch.set_num_threads(1)
    engine = made(int(given.own[0]), given.own[1])
    try:
        if not given.is_plain:
            commit_together(engine)
        DeepSpeedJob(given, engine).run()
    finally:
        engine.destroy()
    say("latest", (given.folder / "latest").read_text())


if __name__ == "__main__":
    main()
