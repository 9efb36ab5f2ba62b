"""torchtitan's manager with Muster's saves, where no rank is needed."""

import inspect
import runpy
from pathlib import Path
from typing import Any

import pytest
from torchtitan.components.checkpointer import CheckpointManager

from muster.worker.integrations import torchtitan as module
from muster.worker.integrations.aside import Aside, Marker
from muster.worker.integrations.torchtitan import CommittedCheckpointManager, latest


def manager(folder: str, **options: Any) -> CommittedCheckpointManager:
    config = CommittedCheckpointManager.Config(enable=True, folder=folder, **options)
    built = config.build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert isinstance(built, CommittedCheckpointManager)
    return built


def test_its_configuration_makes_it_and_has_the_fields_of_theirs(tmp_path: Path):
    built = manager(str(tmp_path), interval=7, keep_latest_k=0)
    assert built.interval == 7


def test_one_that_is_off_does_nothing():
    config = CommittedCheckpointManager.Config(folder="s3://bucket/checkpoints")
    built = config.build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert built.load() is False
    assert built.save(1) is False


def test_a_bucket_is_refused():
    with pytest.raises(ValueError, match=r"s3://bucket/checkpoints is in a bucket, .* Name a folder"):
        manager("s3://bucket/checkpoints")


def test_what_becomes_of_a_lost_rank_is_checked(tmp_path: Path):
    with pytest.raises(ValueError, match=r"on_lost = 'explode': it must be"):
        manager(str(tmp_path), on_lost="explode")


def test_the_latest_is_one_to_go_on_from(tmp_path: Path):
    assert latest(tmp_path) is None
    for step, metadata in ((9, True), (10, True), (11, False)):
        aside = Aside(tmp_path / f"step-{step}", 0, step)
        aside.begin()
        if metadata:
            (aside.unfinished / ".metadata").touch()
        aside.commit(Marker("job", 0, 2, "checkpoint/dcp", step))
    torn = tmp_path / "step-12"
    torn.mkdir()
    (torn / ".metadata").touch()
    assert latest(tmp_path) == tmp_path / "step-10"


@pytest.mark.parametrize("name", ["dcp_save", "_load", "_purge_stale_checkpoints"])
def test_a_manager_that_differs_is_said_so_at_import(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(CheckpointManager, name, lambda self, other: None)
    with pytest.raises(ImportError, match=f"was tried with torchtitan 0.3.0; here CheckpointManager.{name}"):
        runpy.run_path(str(inspect.getsourcefile(module)))
