"""Accelerators that commit, in one process."""

import os
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.worker.integrations.commit.folder_jobs import names

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # Else accelerate says what it has found.

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import ProjectConfiguration

from muster.checkpoint.committed import MARKER, UncommittedError
from muster.checkpoint.manifest import MANIFEST
from muster.worker.integrations import accelerate as module
from muster.worker.integrations.accelerate import adopt, commit_together, latest
from muster.worker.integrations.commit.lookup import REPLACED
from tests.support.crashes.stat_faults import StatFaults
from tests.support.jobs.alone import take_part_alone


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, saves_end_with_their_test: None) -> Iterator[None]:
    take_part_alone(monkeypatch)
    yield
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()


def accelerator(folder: Path, automatic: bool = True, **options: Any) -> Any:
    project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=automatic, **options)
    return commit_together(Accelerator(cpu=True, project_config=project))


def prepared(folder: Path, automatic: bool = True, **options: Any) -> tuple[Any, torch.nn.Linear]:
    """An accelerator with a model."""
    made = accelerator(folder, automatic, **options)
    return made, made.prepare(torch.nn.Linear(1, 1))


def fill(model: torch.nn.Linear, value: float) -> None:
    with torch.no_grad():
        model.weight.fill_(value)


def test_automatic_names_are_kept_counted_and_resumed_from(tmp_path: Path):
    made, model = prepared(tmp_path)
    assert latest(tmp_path) is None
    for step in (1.0, 2.0):
        fill(model, step)
        path = made.save_state()
    assert latest(tmp_path) == Path(path)
    assert path == str(tmp_path / "checkpoints" / "checkpoint_1")
    assert names(tmp_path / "checkpoints") == {"checkpoint_0", "checkpoint_1"}
    fill(model, 0.0)
    made.load_state()
    assert model.weight.item() == 2.0
    made.project_configuration.iteration = 0
    made.load_state()
    assert made.save_state().endswith("checkpoint_2")
    made.load_state(str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert model.weight.item() == 1.0


def test_a_name_of_ones_own_is_replaced(tmp_path: Path):
    made, model = prepared(tmp_path, automatic=False)
    for step in (1.0, 2.0):
        fill(model, step)
        assert made.save_state(str(tmp_path / "last")) == str(tmp_path / "last")
    fill(model, 0.0)
    made.load_state(str(tmp_path / "last"))
    assert model.weight.item() == 2.0
    assert names(tmp_path) == {"last"}


def test_the_last_checkpoint_stays_until_the_next_is_committed(tmp_path: Path):
    made, model = prepared(tmp_path, total_limit=1)
    fill(model, 1.0)
    made.save_state()

    def full(*_: object) -> None:
        assert names(tmp_path / "checkpoints") >= {"checkpoint_0"}
        raise OSError("full")

    hook = made.register_save_state_pre_hook(full)
    with pytest.raises(OSError, match="full"):
        made.save_state()
    hook.remove()
    fill(model, 0.0)
    made.load_state()
    assert model.weight.item() == 1.0
    made.save_state()
    assert names(tmp_path / "checkpoints") == {"checkpoint_1"}


def test_one_of_a_run_that_was_rolled_back_stays_though_its_number_is_low(tmp_path: Path):
    made, _ = prepared(tmp_path, total_limit=2)
    for made.project_configuration.iteration in (5, 6, 0):
        path = made.save_state()
    assert path == str(tmp_path / "checkpoints" / "checkpoint_0")
    assert "checkpoint_0" in names(tmp_path / "checkpoints")
    assert len(names(tmp_path / "checkpoints")) == 2


def test_a_folder_that_holds_something_else_is_not_replaced(tmp_path: Path):
    made, model = prepared(tmp_path, automatic=False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "args.json").write_text("{}")
    with pytest.raises(IsADirectoryError, match=r"out holds args\.json, which is no part of a checkpoint"):
        made.save_state(str(tmp_path / "out"))
    assert names(tmp_path / "out") == {"args.json"}
    theirs = Accelerator(cpu=True)
    theirs.prepare(torch.nn.Linear(1, 1))
    theirs.save_state(str(tmp_path / "theirs"))
    fill(model, 3.0)
    made.save_state(str(tmp_path / "theirs"))
    fill(model, 0.0)
    made.load_state(str(tmp_path / "theirs"))
    assert model.weight.item() == 3.0


def test_folder_that_cannot_be_looked_at_at_first_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made, _ = prepared(tmp_path, automatic=False)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "args.json").write_text("{}")
    with monkeypatch.context() as patched:
        StatFaults(patched, tmp_path / "out", times=1)
        with pytest.raises(IsADirectoryError, match="is no part of a checkpoint"):
            made.save_state(str(tmp_path / "out"))
    assert names(tmp_path / "out") == {"args.json"}


def test_uncommitted_checkpoint_is_not_loaded(tmp_path: Path):
    made, _ = prepared(tmp_path)
    with pytest.raises(UncommittedError, match="no committed checkpoint"):
        made.load_state()
    (tmp_path / "checkpoints" / "checkpoint_3").mkdir(parents=True)
    with pytest.raises(UncommittedError, match="saved without Muster: checkpoint_3"):
        made.load_state()
    with pytest.raises(UncommittedError, match="checkpoint_3 is not a committed checkpoint"):
        made.load_state(str(tmp_path / "checkpoints" / "checkpoint_3"))


def test_adopted_checkpoint_is_loaded(tmp_path: Path):
    made, _ = prepared(tmp_path)
    made.save_state()
    old = tmp_path / "checkpoints" / "checkpoint_0"
    (old / MARKER).unlink()
    (old / MANIFEST).unlink()
    assert latest(tmp_path) is None
    adopt(old)
    assert latest(tmp_path) == old
    made.load_state()
    with pytest.raises(FileNotFoundError, match="nowhere is no checkpoint of Accelerate"):
        adopt(tmp_path / "nowhere")


def test_numbered_save_does_not_replace_an_existing_checkpoint(tmp_path: Path):
    made, _ = prepared(tmp_path)
    made.save_state()
    made.project_configuration.iteration = 0
    with pytest.raises(FileExistsError, match="checkpoint_0 is there already"):
        made.save_state()


def test_one_that_is_made_sweeps_and_gives_names_back(tmp_path: Path):
    made, _ = prepared(tmp_path)
    folder = tmp_path / "checkpoints"
    made.save_state()
    (folder / "checkpoint_0").rename(folder / f".checkpoint_0{REPLACED}")
    (folder / ".accelerate.0-7" / "checkpoint_1").mkdir(parents=True)
    accelerator(tmp_path)
    assert names(folder) == {"checkpoint_0"}


def test_invalid_options_are_refused(tmp_path: Path):
    other: Any = "an accelerator"
    with pytest.raises(TypeError, match="'an accelerator' is no"):
        commit_together(other)
    made, _ = prepared(tmp_path, automatic=False)
    with pytest.raises(ValueError, match="already"):
        commit_together(made)
    with pytest.raises(ValueError, match="name a folder"):
        made.save_state()
    with pytest.raises(ValueError, match="name a folder"):
        made.load_state()
    with pytest.raises(ValueError, match="save_on_each_node"):
        accelerator(tmp_path, save_on_each_node=True)
    mode: Any = "end"
    with pytest.raises(ValueError, match="on_lost = 'end'"):
        commit_together(Accelerator(cpu=True), on_lost=mode)
    with pytest.raises(ValueError, match="timeout = 0"):
        commit_together(Accelerator(cpu=True), timeout=0)


def test_another_accelerator_is_an_import_error(monkeypatch: pytest.MonkeyPatch):
    assert module.__file__
    monkeypatch.setattr(Accelerator, "save_state", lambda self: None)
    with pytest.raises(ImportError, match=r"tried with accelerate .* here Accelerator\.save_state differs"):
        runpy.run_path(module.__file__)
