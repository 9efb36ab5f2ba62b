"""The callback for Transformers' Trainer, in one process and without training."""

import json
import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.worker.integrations.commit.folder_jobs import names

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # Else accelerate says what it has found.

from transformers import Trainer, TrainerState
from transformers.trainer_utils import HubStrategy

from muster.checkpoint.committed import UncommittedError
from muster.worker.decision import Outcome
from muster.worker.errors import BarrierAbortedError
from muster.worker.integrations import transformers as module
from muster.worker.integrations.commit.lookup import REPLACED
from muster.worker.integrations.transformers import CommitCallback, adopt, latest
from tests.support.jobs.alone import Alone, take_part_alone


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, saves_end_with_their_test: None) -> None:
    take_part_alone(monkeypatch)


def arguments(folder: Path, **others: Any) -> Any:
    usual = {
        "output_dir": str(folder),
        "process_index": 0,
        "world_size": 1,
        "save_total_limit": None,
        "enable_jit_checkpoint": False,
        "save_on_each_node": False,
        "push_to_hub": False,
        "hub_strategy": HubStrategy.EVERY_SAVE,
    }
    return SimpleNamespace(**(usual | others))


class Job:
    """A trainer as far as a save of its needs one."""

    def __init__(self, folder: Path, callback: CommitCallback | None = None, **others: Any) -> None:
        self.args = arguments(folder, **others)
        self.state = TrainerState(global_step=0)
        self.callback = callback or CommitCallback()
        self.callback_handler = SimpleNamespace(callbacks=[self.callback])

    def _get_output_dir(self, trial: object) -> str:
        return str(self.args.output_dir)

    def write(self) -> None:
        folder = Path(self._get_output_dir(None)) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True)
        (folder / "part").write_text(str(self.state.global_step))
        self.state.best_model_checkpoint = str(folder)

    def save(self, step: int, write: Any = None) -> None:
        self.state.global_step = step
        trainer: Any = self
        self.callback.save(trainer, write or self.write, None)


def test_a_checkpoint_has_its_name_when_it_is_whole(tmp_path: Path):
    job = Job(tmp_path)

    def write() -> None:
        job.write()
        assert latest(tmp_path) is None
        assert not (tmp_path / "checkpoint-1").exists()

    job.save(1, write)
    assert latest(tmp_path) == tmp_path / "checkpoint-1"
    assert (tmp_path / "checkpoint-1" / "part").read_text() == "1"
    assert names(tmp_path) == {"checkpoint-1"}


def test_its_state_knows_the_name_that_it_has(tmp_path: Path):
    job = Job(tmp_path)
    job.save(1)
    path = str(tmp_path / "checkpoint-1")
    assert job.state.best_model_checkpoint == path
    assert json.loads((Path(path) / module.STATE).read_text())["best_model_checkpoint"] == path


def test_older_ones_go_when_the_next_is_committed_and_not_before(tmp_path: Path):
    job = Job(tmp_path, save_total_limit=1)
    job.save(1)
    with pytest.raises(OSError, match="full"):
        job.save(2, lambda: fail(OSError("full")))
    assert names(tmp_path) >= {"checkpoint-1"}
    job.save(3)
    assert names(tmp_path) == {"checkpoint-3"}


def fail(error: Exception) -> None:
    raise error


def test_leftovers_of_a_failed_save_are_removed_by_the_next_save(tmp_path: Path):
    job = Job(tmp_path)

    def write() -> None:
        job.write()
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        job.save(1, write)
    assert latest(tmp_path) is None
    assert job.state.best_model_checkpoint is None
    job.save(2)
    assert names(tmp_path) == {"checkpoint-2"}


def test_ranks_at_different_steps_are_no_checkpoint(tmp_path: Path):
    job = Job(tmp_path)

    def write() -> None:
        job.write()
        (Path(job._get_output_dir(None)) / "checkpoint-2").mkdir()

    with pytest.raises(OSError, match="checkpoint-1, checkpoint-2, and not checkpoint-1"):
        job.save(1, write)
    assert latest(tmp_path) is None


def test_the_last_one_is_what_was_committed_last(tmp_path: Path):
    job = Job(tmp_path)
    for step in (9, 10):
        job.save(step)
    (tmp_path / "checkpoint-11").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    assert latest(tmp_path) == tmp_path / "checkpoint-10"
    assert job.callback.resume(job.args, True) == str(tmp_path / "checkpoint-10")
    assert job.callback.resume(job.args, str(tmp_path / "checkpoint-9")) == str(tmp_path / "checkpoint-9")
    job.save(3)  # The run went back.
    assert latest(tmp_path) == tmp_path / "checkpoint-3"
    assert job.callback.resume(job.args, True) == str(tmp_path / "checkpoint-3")


def test_training_does_not_resume_from_an_uncommitted_checkpoint(tmp_path: Path):
    job = Job(tmp_path)
    with pytest.raises(UncommittedError, match="no committed checkpoint"):
        job.callback.resume(job.args, True)
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(UncommittedError, match="saved without Muster: checkpoint-3"):
        job.callback.resume(job.args, True)
    with pytest.raises(UncommittedError, match="checkpoint-3 is not a committed checkpoint"):
        job.callback.resume(job.args, str(tmp_path / "checkpoint-3"))


def test_adopted_checkpoint_is_resumed_from(tmp_path: Path):
    job = Job(tmp_path)
    old = tmp_path / "checkpoint-3"
    old.mkdir()
    with pytest.raises(FileNotFoundError, match="checkpoint-3 is no checkpoint of Transformers"):
        adopt(old)
    (old / "trainer_state.json").write_text("{}")
    adopt(old)
    assert latest(tmp_path) == old
    assert job.callback.resume(job.args, True) == str(old)
    with pytest.raises(FileExistsError, match="checkpoint-3 is committed"):
        adopt(old)


def test_a_rank_does_not_resume_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    job = Job(tmp_path)
    job.save(1)
    monkeypatch.setattr(Alone, "outcome", Outcome.ABORTED)
    with pytest.raises(BarrierAbortedError):
        job.callback.resume(job.args, True)


def test_a_new_trainer_sweeps_and_gives_names_back(tmp_path: Path):
    job = Job(tmp_path)
    job.save(1)
    (tmp_path / "checkpoint-1").rename(tmp_path / f".checkpoint-1{REPLACED}")
    (tmp_path / ".checkpoint.0-7" / "checkpoint-2").mkdir(parents=True)
    state: Any = None
    CommitCallback().on_init_end(job.args, state, state)
    assert names(tmp_path) == {"checkpoint-1"}


@pytest.mark.parametrize(
    ("others", "why"),
    [
        ({"enable_jit_checkpoint": True}, "SavePoint"),
        ({"save_on_each_node": True}, "all ranks share"),
        ({"push_to_hub": True}, "before it is committed"),
        ({"world_size": 2}, "rank 0 of 2 of the job, and rank 0 of 1"),
    ],
)
def test_arguments_that_prevent_a_commit_are_refused(tmp_path: Path, others: dict[str, Any], why: str):
    state: Any = None
    with pytest.raises(ValueError, match=why):
        CommitCallback().on_init_end(arguments(tmp_path, **others), state, state)


def test_it_is_told_what_it_does_not_know():
    mode: Any = "end"
    with pytest.raises(ValueError, match="on_lost = 'end'"):
        CommitCallback(on_lost=mode)
    with pytest.raises(ValueError, match="timeout = 0"):
        CommitCallback(timeout=0)


def test_trainers_without_the_callback_are_as_they_were(tmp_path: Path):
    seen: list[Any] = []
    saves = module._saves(lambda *given: seen.append(given))
    trains = module._trains(lambda *given: seen.append(given))
    job: Any = Job(tmp_path)
    job.callback_handler.callbacks = []
    saves(job, "model", None)
    trains(job, True)
    assert seen == [(job, "model", None), (job, True)]


def test_trainers_with_it_save_and_resume_by_it(tmp_path: Path):
    job: Any = Job(tmp_path)
    module._saves(lambda trainer, *_: trainer.write())(job, "model", None)
    assert latest(tmp_path) == tmp_path / "checkpoint-0"
    resumed = module._trains(lambda trainer, checkpoint: checkpoint)
    assert resumed(job, True) == str(tmp_path / "checkpoint-0")
    assert resumed(job, None) is None


def test_another_trainer_is_an_import_error(monkeypatch: pytest.MonkeyPatch):
    assert module.__file__
    monkeypatch.setattr(Trainer, "_save_checkpoint", lambda self, model: None)
    with pytest.raises(ImportError, match=r"tried with transformers 5.* here Trainer\._save_checkpoint"):
        runpy.run_path(module.__file__)
