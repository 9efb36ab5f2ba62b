"""Strategies that commit are made by a call or by name; others are refused."""

import inspect
import pickle
import runpy
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
)

from muster.worker.integrations import lightning as module
from muster.worker.integrations.lightning import committed
from tests.unit.worker.integrations.lightning.strategies import Alone, ddp, state


def test_a_barrier_of_other_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    barrier: Any = Alone()
    strategy = ddp(barrier=barrier, timeout=5.0, on_lost="abort")
    monkeypatch.setattr(Alone, "world_size", 2)
    with pytest.raises(ValueError, match="is rank 0 of 1 of the trainer, and rank 0 of 2 of the barrier"):
        strategy.save_checkpoint(state(1), tmp_path / "a.ckpt")


def test_unsupported_strategy_or_option_is_refused():
    for other in ("ddp", DDPStrategy, None):
        given: Any = other
        with pytest.raises(TypeError, match=r"is not one of lightning.pytorch's DDPStrategy"):
            committed(given)
    with pytest.raises(ValueError, match="commits its checkpoints already"):
        committed(ddp())
    with pytest.raises(ValueError, match='on_lost = \'exit\': it must be "raise" or "abort"'):
        ddp(on_lost="exit")
    with pytest.raises(ValueError, match="timeout = 0"):
        ddp(timeout=0)
    some_ranks: Any = Alone()
    some_ranks.participants = (0,)
    with pytest.raises(ValueError, match=r"only ranks \[0\], and all ranks of the job write"):
        ddp(barrier=some_ranks)


@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("committed_ddp", DDPStrategy),
        ("committed_fsdp", FSDPStrategy),
        ("committed_model_parallel", ModelParallelStrategy),
    ],
)
def test_a_strategy_is_made_by_its_name(name: str, theirs: type[Any]):
    strategy = StrategyRegistry.get(name)
    assert isinstance(strategy, theirs)
    assert isinstance(strategy, module.CommittedSaves)
    assert type(strategy).__name__ == f"Committed{theirs.__name__}"


def test_it_does_not_go_to_another_process():
    with pytest.raises(TypeError, match="CommittedDDPStrategy cannot go to another process"):
        pickle.dumps(ddp())


@pytest.mark.parametrize("name", ["save_checkpoint", "on_train_start"])
def test_a_strategy_that_differs_is_said_so_at_import(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(Strategy, name, lambda self, other: None)
    with pytest.raises(ImportError, match=f"was tried with Lightning 2.6.6; here Strategy.{name} differs"):
        runpy.run_path(str(inspect.getsourcefile(module)))
