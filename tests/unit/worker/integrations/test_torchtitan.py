"""torchtitan's manager with Muster's saves, where no rank is needed."""

import inspect
import runpy
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager
from torchtitan.components.checkpointer import AsyncMode, CheckpointManager

from lab.patience import until
from muster.checkpoint.committed import UncommittedError
from muster.checkpoint.damage import KEPT
from muster.worker.integrations import torchtitan as module
from muster.worker.integrations.commit.lookup import Marker
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from muster.worker.integrations.torchtitan import CommittedCheckpointManager, latest
from tests.support.expect import raising


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


def test_invalid_on_lost_or_timeout_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"on_lost = 'explode': it must be"):
        manager(str(tmp_path), on_lost="explode")
    with pytest.raises(ValueError, match="timeout = 0"):
        manager(str(tmp_path), timeout=0)


def commit(folder: Path, step: int, *, metadata: bool = True) -> Path:
    """Make a checkpoint of torch's format, or another."""
    path = folder / f"step-{step}"
    staged = StagedCheckpoint(path, 0, step, "job")
    staged.begin()
    if metadata:
        (staged.unfinished / ".metadata").touch()
    staged.commit(Marker("job", 0, 2, "checkpoint/dcp", step))
    return path


def replace_half(path: Path) -> None:
    """As a process leaves it that is killed while it replaces a checkpoint."""
    path.rename(path.with_name(f".{path.name}.replaced"))


def test_the_latest_is_one_to_go_on_from(tmp_path: Path):
    assert latest(tmp_path) is None
    for step, metadata in ((9, True), (10, True), (11, False)):
        commit(tmp_path, step, metadata=metadata)
    torn = tmp_path / "step-12"
    torn.mkdir()
    (torn / ".metadata").touch()
    assert latest(tmp_path) == tmp_path / "step-10"
    replace_half(commit(tmp_path, 13))
    assert latest(tmp_path) == tmp_path / "step-10"


def test_a_step_that_was_named_must_have_its_name(tmp_path: Path):
    """torchtitan looks for it there."""
    replace_half(commit(tmp_path, 13))
    with pytest.raises(UncommittedError, match="step-13 is being replaced"):
        module._in_its_place(tmp_path / "step-13")


@pytest.fixture
def purging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[str]]:
    """Has a manager that keeps two purge, and tells what is left."""
    made = manager(str(tmp_path), keep_latest_k=2)
    monkeypatch.setattr(made, "_should_purge", lambda: True)

    def purge(**known: Path) -> set[str]:
        for name, path in known.items():
            setattr(made, f"_{name}", path)
        made._purge_stale_checkpoints()
        made.close()
        return {path.name for path in tmp_path.iterdir()}

    return purge


def test_those_are_kept_that_were_committed_last(tmp_path: Path, purging: Callable[..., set[str]]):
    """A run that was rolled back commits lower steps than it has."""
    for step in (10, 20, 30, 11, 12):
        commit(tmp_path, step)
    assert latest(tmp_path) == tmp_path / "step-12"
    assert purging() == {"step-11", "step-12"}


def test_checkpoint_that_is_marked_as_kept_is_not_purged(tmp_path: Path, purging: Callable[..., set[str]]):
    for step in (10, 20, 30, 40):
        commit(tmp_path, step)
    (tmp_path / "step-10" / KEPT).touch()
    assert purging() == {"step-10", "step-30", "step-40"}


def test_checkpoint_without_metadata_does_not_count_towards_the_kept_number(
    tmp_path: Path, purging: Callable[..., set[str]]
):
    for step in (10, 20):
        commit(tmp_path, step)
    for step in (30, 40):
        commit(tmp_path, step, metadata=False)
    assert purging() == {"step-10", "step-20", "step-30", "step-40"}


@pytest.mark.parametrize("what", ["loaded", "writing"])
def test_checkpoint_in_use_is_not_purged(tmp_path: Path, purging: Callable[..., set[str]], what: str):
    """An asynchronous save may give its name to a new one at this moment."""
    for step in (10, 20, 30):
        commit(tmp_path, step)
    assert purging(**{what: tmp_path / "step-10"}) == {"step-10", "step-30"}


def test_purge_logs_a_checkpoint_that_cannot_be_removed_and_continues(
    tmp_path: Path,
    purging: Callable[..., set[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """Rank 0 alone would raise, and the others wait for it."""
    for step in (10, 20, 30):
        commit(tmp_path, step)
    monkeypatch.setattr(module, "retire", raising(PermissionError, "not yours"))
    assert purging() == {"step-10", "step-20", "step-30"}
    assert "not yours" in caplog.text


def test_closing_waits_for_the_last_save_and_its_failure_is_told_once(tmp_path: Path):
    made: Any = manager(str(tmp_path))
    made.async_mode = AsyncMode.ASYNC
    made.save_future = Future()
    made.save_future.set_exception(OSError("no space"))
    with pytest.raises(OSError, match="no space"):
        made.close()
    assert made.purge_thread is not None
    assert not made.purge_thread.is_alive()
    made.close()


def test_an_interrupt_of_waiting_for_a_save_does_not_end_the_save(tmp_path: Path):
    """Which is waited for when all is closed."""
    made: Any = manager(str(tmp_path))
    made.async_mode = AsyncMode.ASYNC
    saving: Any = Future()
    made.save_future = saving
    saving.result = raising(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        made.maybe_wait_for_saving()
    del saving.result
    assert made.save_future is saving
    saving.set_result(None)
    made.close()
    assert made.save_future is None


def test_a_garbage_collection_waits_for_no_save(tmp_path: Path):
    """It may be on the thread that saves."""
    made: Any = manager(str(tmp_path))
    made.async_mode = AsyncMode.ASYNC
    made.save_future = Future()
    purging = made.purge_thread
    made.__del__()
    until(lambda: not purging.is_alive())
    made.save_future = None


def test_an_asynchronous_save_is_of_all_that_the_state_holds_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A data loader goes on counting in its state."""

    def save(state: dict[str, Any], async_stager: DefaultStager, **_: Any) -> Future[Any]:
        copied = async_stager.stage(state)
        assert isinstance(copied, dict)
        staged.update(copied)
        return Future()

    staged: dict[str, Any] = {}
    monkeypatch.setattr(module, "CommittedWriter", lambda *_, **__: None)
    monkeypatch.setattr(dcp, "async_save", save)
    state: dict[str, Any] = {"weight": torch.zeros(1), "seen": [1, 2]}
    made = manager(str(tmp_path))
    made.pg = None
    made.dcp_save(state, str(tmp_path / "step-1"), AsyncMode.ASYNC)
    state["weight"].add_(1)
    state["seen"].append(3)
    assert staged == {"weight": torch.zeros(1), "seen": [1, 2]}


@pytest.mark.parametrize("name", ["dcp_save", "_load", "_purge_stale_checkpoints"])
def test_a_manager_that_differs_is_said_so_at_import(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr(CheckpointManager, name, lambda self, other: None)
    with pytest.raises(ImportError, match=f"was tried with torchtitan 0.3.0; here CheckpointManager.{name}"):
        runpy.run_path(str(inspect.getsourcefile(module)))
