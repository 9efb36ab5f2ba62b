"""A strategy commits, replaces and removes checkpoints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint import CheckpointException

from muster.checkpoint.damage import KEPT
from muster.checkpoint.inventory import FolderInventory
from muster.worker.decision import Outcome
from muster.worker.errors import MemberLostError, MusterError
from muster.worker.integrations import lightning as module
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from muster.worker.integrations.lightning import latest
from tests.support.crashes.stat_faults import StatFaults
from tests.support.expect import raising
from tests.support.saves.synced import Synced
from tests.unit.worker.integrations.commit.folder_jobs import names
from tests.unit.worker.integrations.lightning.strategies import (
    MADE,
    Alone,
    Sharded,
    ddp,
    fully_sharded,
    state,
)


@pytest.mark.parametrize("made", MADE)
def test_saved_checkpoint_is_loaded_and_its_name_can_be_reused(tmp_path: Path, made: Any):
    path = tmp_path / "far" / "last.ckpt"
    strategy = made()
    for step in (1, 2):
        strategy.save_checkpoint(state(step), path)
        loaded = strategy.load_checkpoint(path)
        assert loaded.keys() == {"global_step", "state_dict"}
        assert loaded["global_step"] == step
        assert latest(path.parent) == path
    assert names(path.parent) - {".last.ckpt.committed"} == {"last.ckpt"}


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize(
    "place",
    [
        (StagedCheckpoint, "prepare"),
        (torch, "save"),
        (module, "_check_sharded"),
        (StagedCheckpoint, "commit"),
    ],
)
def test_a_save_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any, place: tuple[Any, str]
):
    strategy = made()
    path = tmp_path / "last.ckpt"
    strategy.save_checkpoint(state(1), path)
    with monkeypatch.context() as patched:
        patched.setattr(*place, full)
        with pytest.raises(OSError, match="No space left"):
            strategy.save_checkpoint(state(2), path)
    assert strategy.load_checkpoint(path)["global_step"] == 1
    strategy.save_checkpoint(state(3), tmp_path / "other.ckpt")
    assert strategy.load_checkpoint(tmp_path / "other.ckpt")["global_step"] == 3
    beside = {".last.ckpt.committed", ".other.ckpt.committed"}
    assert names(tmp_path) - beside == {"last.ckpt", "other.ckpt"}, "what the failed save has left is swept"


def test_a_save_that_not_all_have_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    strategy = ddp()
    strategy.save_checkpoint(state(1), tmp_path / "last.ckpt")
    monkeypatch.setattr(Alone, "outcome", Outcome.MEMBER_LOST)
    with pytest.raises(MemberLostError):
        strategy.save_checkpoint(state(2), tmp_path / "last.ckpt")
    assert strategy.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 1


def test_rank_that_fails_in_a_collective_is_not_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def closed(*_: object, **__: object) -> None:
        torch.distributed.distributed_c10d._get_default_group()  # Raises there: nobody has made one.

    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_group", collective)
    strategy = ddp()
    with monkeypatch.context() as patched:
        patched.setattr(TorchCheckpointIO, "save_checkpoint", closed)
        with pytest.raises(MusterError, match=r"was given up: .* on ranks \[0\]") as caught:
            strategy.save_checkpoint(state(1), tmp_path / "last.ckpt")
    assert "Connection closed by peer" in str(caught.value.__cause__)
    strategy.save_checkpoint(state(2), tmp_path / "last.ckpt")


def _raise() -> None:
    raise RuntimeError("Connection closed by peer")


collective: Any = eval(
    "lambda: _raise()", {"__name__": "torch.distributed.distributed_c10d", "_raise": _raise}
)


@pytest.mark.parametrize(("rank", "error"), [(0, CheckpointException), (1, MusterError)])
def test_rank_of_the_failed_part_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, error: type[BaseException]
):
    monkeypatch.setattr(
        TorchCheckpointIO,
        "save_checkpoint",
        raising(CheckpointException, "write", {rank: (OSError("full"), traceback())}),
    )
    with pytest.raises(error):
        ddp().save_checkpoint(state(1), tmp_path / "last.ckpt")


def traceback() -> Any:
    import traceback

    return traceback.extract_stack()


@pytest.mark.parametrize("made", MADE)
def test_all_is_on_the_disk_before_a_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any
):
    synced = Synced.record(monkeypatch)
    strategy, path = made(), tmp_path / "new" / "last.ckpt"
    strategy.save_checkpoint(state(1), path)
    synced.check_committed(path)
    synced.check_made(path.parent)


def test_ranks_at_different_steps_make_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Sharded, "broadcast", lambda _, said: (8, said[1]))
    with pytest.raises(ValueError, match="rank 0 is at step 4, and rank 0 at step 8: that is no checkpoint"):
        fully_sharded().save_checkpoint(state(4), tmp_path / "last.ckpt")
    assert names(tmp_path) == set()


def test_if_another_rank_cannot_begin_to_write_this_one_does_not_and_is_not_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Sharded, "reduce_boolean_decision", lambda *_: False)
    with pytest.raises(MusterError, match=r"was given up: .* on ranks \[0\]") as caught:
        fully_sharded().save_checkpoint(state(4), tmp_path / "last.ckpt")
    assert "another rank" in str(caught.value.__cause__)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_checkpoint_that_is_removed_is_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    strategy = fully_sharded()
    strategy.save_checkpoint(state(1), tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to("a.ckpt")
    strategy.remove_checkpoint(str(tmp_path / "last.ckpt"))
    assert names(tmp_path) == {"a.ckpt"}
    strategy.remove_checkpoint(tmp_path / "a.ckpt")
    strategy.remove_checkpoint(tmp_path / "a.ckpt")
    assert names(tmp_path) == set()


def test_unfinished_save_is_not_named_like_a_queueing_system_checkpoint(tmp_path: Path):
    written = []

    class Watched(TorchCheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: Any, path: Path, storage_options: Any = None) -> None:
            written.append(path.parent.name)
            super().save_checkpoint(checkpoint, path, storage_options)

    strategy = ddp()
    strategy.checkpoint_io = Watched()
    strategy.save_checkpoint(state(1), tmp_path / "hpc_ckpt_3.ckpt")
    assert written == [".hpc-ckpt-3.ckpt.0-0-fbd8e0f8"]
    assert names(tmp_path) == {"hpc_ckpt_3.ckpt", ".hpc_ckpt_3.ckpt.committed"}


@pytest.mark.parametrize("made", MADE)
def test_checkpoint_that_is_marked_as_kept_is_not_removed(tmp_path: Path, made: Any):
    strategy = made()
    for name in ("one.ckpt", "two.ckpt"):
        strategy.save_checkpoint(state(1), tmp_path / name)
    (checkpoint,) = [one for one in FolderInventory(tmp_path).checkpoints() if one.name == "one.ckpt"]
    FolderInventory(tmp_path).mark(checkpoint, KEPT)
    for name in ("one.ckpt", "two.ckpt", "nothing.ckpt"):
        strategy.remove_checkpoint(tmp_path / name)
    assert strategy.load_checkpoint(tmp_path / "one.ckpt")["global_step"] == 1
    assert names(tmp_path) - {".one.ckpt.committed"} == {"one.ckpt"}


def test_folder_save_replaces_neither_foreign_folders_nor_files(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").touch()
    with pytest.raises(IsADirectoryError, match="data is a folder, and no checkpoint"):
        fully_sharded().save_checkpoint(state(1), tmp_path / "data")
    ddp().save_checkpoint(state(1), tmp_path / "a.ckpt")
    with pytest.raises(FileExistsError, match=r"a\.ckpt is a file, which no rename"):
        fully_sharded().save_checkpoint(state(1), tmp_path / "a.ckpt")
    assert ddp().load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 1


def test_checkpoint_that_cannot_be_looked_at_at_first_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    torch.save({}, tmp_path / "theirs.ckpt")
    faults = StatFaults(monkeypatch, tmp_path / "theirs.ckpt", times=1)
    assert latest(tmp_path) == tmp_path / "theirs.ckpt"
    assert faults.struck == 1


def test_a_file_takes_the_place_of_a_folder(tmp_path: Path):
    fully_sharded().save_checkpoint(state(1), tmp_path / "a.ckpt")
    ddp().save_checkpoint(state(2), tmp_path / "a.ckpt")
    assert ddp().load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 2
    assert names(tmp_path) == {"a.ckpt", ".a.ckpt.committed"}


def test_a_checkpoint_that_is_not_in_a_folder_is_refused():
    with pytest.raises(ValueError, match=r"s3://bucket/a.ckpt is not in a folder"):
        ddp().save_checkpoint(state(1), "s3://bucket/a.ckpt")


def test_checkpoint_io_that_writes_after_the_save_returns_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    strategy = ddp()
    strategy.checkpoint_io = AsyncCheckpointIO()
    trainer = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING))
    with pytest.raises(ValueError, match="AsyncCheckpointIO writes after the save has returned"):
        strategy.setup(trainer)
    strategy.checkpoint_io = TorchCheckpointIO()
    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", lambda *_, **__: None)
    with pytest.raises(
        FileNotFoundError,
        match=r"TorchCheckpointIO has not written .*a\.ckpt\.0-0-fbd8e0f8/a\.ckpt when it was",
    ):
        strategy.save_checkpoint(state(1), tmp_path / "a.ckpt")
