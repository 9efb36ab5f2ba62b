"""A strategy loads only committed, whole checkpoints, and finds the latest one."""

import errno
import os
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from muster.checkpoint import retry
from muster.checkpoint.committed import MARKER, UncommittedError
from muster.checkpoint.damage import CorruptCheckpointError
from muster.checkpoint.directory import write_marker
from muster.checkpoint.manifest import MANIFEST
from muster.worker.errors import MusterError
from muster.worker.integrations.commit import contents
from muster.worker.integrations.commit.lookup import REPLACED, Marker
from muster.worker.integrations.lightning import latest
from tests.support.saves.damage import flip
from tests.unit.worker.integrations.commit.folder_jobs import names
from tests.unit.worker.integrations.lightning.strategies import Sharded, ddp, fully_sharded, state


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 the beginning of an archive"])
def test_a_file_that_is_torn_is_not_loaded(tmp_path: Path, content: bytes):
    path = tmp_path / "last.ckpt"
    path.write_bytes(content)
    with pytest.raises(UncommittedError, match=r"last\.ckpt is not a whole checkpoint"):
        ddp().load_checkpoint(path)
    assert latest(tmp_path) is None


def test_file_that_cannot_be_read_is_not_taken_for_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    torch.save(state(1), tmp_path / "theirs.ckpt")
    monkeypatch.setattr(retry, "DELAYS", (0.0,))
    with monkeypatch.context() as patched:
        patched.setattr(contents, "ZipFile", unreadable)
        with pytest.raises(OSError, match="Input/output error"):
            latest(tmp_path)
    assert latest(tmp_path) == tmp_path / "theirs.ckpt"


def unreadable(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_whole_file_not_written_by_muster_is_loaded(tmp_path: Path):
    torch.save(state(1), tmp_path / "theirs.ckpt")
    assert ddp().load_checkpoint(tmp_path / "theirs.ckpt")["global_step"] == 1
    with pytest.raises(Exception, match="Weights only"):
        torch.save({"a": SimpleNamespace()}, tmp_path / "objects.ckpt")
        ddp().load_checkpoint(tmp_path / "objects.ckpt", weights_only=True)


def test_a_folder_that_was_not_committed_is_not_loaded_and_passed_over(tmp_path: Path):
    path = tmp_path / "last.ckpt"
    strategy = fully_sharded()
    Sharded.save_checkpoint(strategy, state(1), path)
    for name in (path, tmp_path / "nowhere.ckpt"):
        with pytest.raises(UncommittedError, match="is not a committed checkpoint"):
            strategy.load_checkpoint(name)
    assert latest(tmp_path) is None
    strategy.save_checkpoint(state(2), path)
    assert strategy.load_checkpoint(path)["global_step"] == 2, "it is replaced by one that is whole"


def test_a_checkpoint_that_has_lost_its_metadata_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    strategy = fully_sharded()
    strategy.save_checkpoint(state(1), tmp_path / "last.ckpt")
    write_marker(tmp_path / "last.ckpt", asdict(Marker("job", 0, 1, "by an earlier version", 0)))
    assert strategy.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 1
    assert "last.ckpt has no digests: it is loaded unverified" in caplog.text
    (tmp_path / "last.ckpt" / "meta.pt").touch()  # As Lightning's has one, with the metadata of its shards.
    with pytest.raises(UncommittedError, match=r"last\.ckpt is not whole any more: .*\.metadata"):
        strategy.load_checkpoint(tmp_path / "last.ckpt")


def test_a_folder_that_is_damaged_is_not_loaded_and_passed_over(tmp_path: Path):
    strategy = fully_sharded()
    for step in (1, 2):
        strategy.save_checkpoint(state(step), tmp_path / f"step-{step}.ckpt")
    assert names(tmp_path / "step-2.ckpt") == {"__0_0.distcp", "rest", MARKER, MANIFEST}
    (tmp_path / "step-2.ckpt" / "__0_0.distcp").write_text("a shird")
    for _ in range(2):
        with pytest.raises(
            CorruptCheckpointError, match=r"step-2\.ckpt is damaged: __0_0.distcp at offset 0"
        ):
            strategy.load_checkpoint(tmp_path / "step-2.ckpt")
    assert latest(tmp_path) == tmp_path / "step-1.ckpt"
    (tmp_path / "step-1.ckpt" / "rest").unlink()
    with pytest.raises(CorruptCheckpointError, match=r"step-1\.ckpt is damaged: rest: it is missing"):
        strategy.load_checkpoint(tmp_path / "step-1.ckpt")
    with pytest.raises(CorruptCheckpointError, match="all committed checkpoints are damaged"):
        latest(tmp_path)
    torch.save(state(3), tmp_path / "step-3.ckpt")
    assert latest(tmp_path) == tmp_path / "step-3.ckpt"


def test_checkpoint_that_another_rank_finds_damaged_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    strategy = fully_sharded()
    strategy.save_checkpoint(state(1), tmp_path / "last.ckpt")
    said = iter([True, True, False])
    monkeypatch.setattr(Sharded, "reduce_boolean_decision", lambda *_: next(said))
    with pytest.raises(CorruptCheckpointError, match=r"last\.ckpt is damaged: .* another rank has found it"):
        strategy.load_checkpoint(tmp_path / "last.ckpt")


def test_load_fails_if_the_checkpoint_is_replaced_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "last.ckpt"
    strategy = fully_sharded()
    strategy.save_checkpoint(state(1), path)
    load = Sharded.load_checkpoint

    def slow(self: Sharded, *arguments: Any) -> Any:
        loaded = load(self, *arguments)
        fully_sharded().save_checkpoint(state(2), path)
        return loaded

    monkeypatch.setattr(Sharded, "load_checkpoint", slow)
    with pytest.raises(RuntimeError, match=r"last\.ckpt was replaced while it was loaded"):
        strategy.load_checkpoint(path)


def test_ranks_that_have_loaded_different_files_hear_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    strategy = ddp()
    strategy.save_checkpoint(state(1), tmp_path / "last.ckpt")
    said = iter([tmp_path / "last.ckpt", (None, "job 0-7")])
    monkeypatch.setattr(DDPStrategy, "broadcast", lambda *_: next(said))
    with pytest.raises(RuntimeError, match=r"last\.ckpt was replaced while it was loaded"):
        strategy.load_checkpoint("")


def test_checkpoint_that_another_rank_cannot_use_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    strategy = ddp()
    strategy.save_checkpoint(state(1), tmp_path / "last.ckpt")
    monkeypatch.setattr(DDPStrategy, "reduce_boolean_decision", lambda *_: False)
    with pytest.raises(UncommittedError, match="another rank cannot use"):
        strategy.load_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("last.ckpt", "rank 0 has last.ckpt to resume from, and another rank has none"),
        (None, "rank 0 has no checkpoint to resume from, and another rank has one"),
    ],
)
def test_rank_that_alone_finds_a_checkpoint_or_none_does_not_begin(
    monkeypatch: pytest.MonkeyPatch, path: str | None, text: str
):
    strategy = ddp()
    trainer = Trainer(accelerator="cpu", strategy=strategy, logger=False)
    strategy._lightning_module = SimpleNamespace(trainer=trainer)
    monkeypatch.setattr(DDPStrategy, "setup_environment", lambda _: None)
    strategy.setup_environment()
    # Another rank finds the opposite, so no answer is the same on all.
    monkeypatch.setattr(DDPStrategy, "reduce_boolean_decision", lambda *_: False)
    with pytest.raises(MusterError, match=text):
        trainer._checkpoint_connector.resume_start(path)


def test_lost_checkpoint_name_is_restored_before_training_starts_from_scratch(tmp_path: Path):
    strategy = fully_sharded()
    strategy.save_checkpoint(state(1), tmp_path / "last.ckpt")
    (tmp_path / "last.ckpt").rename(tmp_path / f".last.ckpt{REPLACED}")
    trainer = SimpleNamespace(ckpt_path="given", checkpoint_callbacks=[ModelCheckpoint(tmp_path)])
    strategy._lightning_module = SimpleNamespace(trainer=trainer)
    strategy.on_train_start()
    trainer.ckpt_path = None
    with pytest.raises(MusterError, match=r"last\.ckpt had lost its name"):
        strategy.on_train_start()
    assert names(tmp_path) == {"last.ckpt"}
    strategy.on_train_start()


def test_the_latest_is_the_file_or_folder_that_was_committed_last(tmp_path: Path):
    assert latest(tmp_path / "nowhere") is None
    torch.save(state(1), tmp_path / "theirs.ckpt")
    assert latest(tmp_path) == tmp_path / "theirs.ckpt"
    torch.save({}, tmp_path / ".hidden.ckpt")
    for made, name in ((fully_sharded, "folder.ckpt"), (ddp, "file.ckpt"), (fully_sharded, "again.ckpt")):
        made().save_checkpoint(state(2), tmp_path / name)
        os.utime(tmp_path / name, (1, 1))
        assert latest(tmp_path) == tmp_path / name


def test_file_that_is_damaged_is_not_loaded_and_passed_over(tmp_path: Path):
    strategy = ddp()
    for step in (1, 2):
        strategy.save_checkpoint(state(step), tmp_path / f"step-{step}.ckpt")
    path = tmp_path / "step-2.ckpt"
    flip(path)
    for _ in range(2):
        with pytest.raises(
            CorruptCheckpointError, match=r"step-2\.ckpt is damaged: step-2\.ckpt at offset 0"
        ):
            strategy.load_checkpoint(path)
    assert latest(tmp_path) == tmp_path / "step-1.ckpt"
    assert strategy.load_checkpoint(tmp_path / "step-1.ckpt")["global_step"] == 1
    strategy.save_checkpoint(state(3), path)
    assert strategy.load_checkpoint(path)["global_step"] == 3
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(CorruptCheckpointError, match=r"bytes, and .* were written"):
        strategy.load_checkpoint(path)


def test_file_of_an_interrupted_commit_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    strategy, path = ddp(), tmp_path / "last.ckpt"
    strategy.save_checkpoint(state(1), path)
    (tmp_path / ".last.ckpt.committed").rename(tmp_path / ".last.ckpt.0-0-fbd8e0f8")
    flip(path)
    with pytest.raises(CorruptCheckpointError):
        strategy.load_checkpoint(path)
