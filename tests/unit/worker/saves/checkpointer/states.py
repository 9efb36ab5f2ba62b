"""States that the tests save, load and damage."""

from pathlib import Path
from typing import Any

import torch

from muster.worker.saves import Checkpointer
from tests.support.saves.damage import flip


def state(value: float) -> dict[str, Any]:
    value = float(value)
    return {"model": {"weight": torch.full((1000,), value), "bias": torch.full((3,), value)}, "step": value}


def loaded(made: Checkpointer, path: Path | None = None) -> tuple[int, float]:
    into = state(-7)
    found = made.load(into, path)
    weight = into["model"]["weight"]
    assert torch.equal(weight, torch.full((1000,), into["step"]))
    return found.step, into["step"]


def save_steps(made: Checkpointer, *steps: int) -> None:
    for step in steps:
        made.save(step, state(step))
    assert made.finalize(blocking=True) == list(steps)


def hurt(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
        return
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flip(path)
