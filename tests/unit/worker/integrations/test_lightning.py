"""Strategies of Lightning that commit, in one process and without a trainer."""

import inspect
import os
import pickle
import runpy
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.checkpoint import CheckpointException

from muster.checkpoint.committed import MARKER, UncommittedError
from muster.checkpoint.damage import KEPT, CorruptCheckpointError
from muster.checkpoint.directory import write_marker
from muster.checkpoint.inventory import FolderInventory
from muster.checkpoint.manifest import MANIFEST
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import MemberLostError, MusterError
from muster.worker.groups.voting import VotingBarrier
from muster.worker.integrations import lightning as module
from muster.worker.integrations.commit import commitment
from muster.worker.integrations.commit.lookup import REPLACED, Marker
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from muster.worker.integrations.lightning import committed, latest
from tests.support.saves.damage import flip
from tests.support.saves.synced import Synced


class Alone(VotingBarrier):
    """The barrier of a job of one rank."""

    prefix, rank, world_size, run_id, generation = "checkpoint/lightning", 0, 1, "job", 0
    sequence = 0
    outcome = Outcome.RELEASED

    def __init__(self, *_: object) -> None:
        """As the real one is made."""

    def vote(
        self,
        failure: str | None = None,
        timeout_secs: float | None = None,
        payload: bytes = b"",
        early: object = None,
        report: object = None,
    ) -> Decision:
        Alone.sequence += 1
        outcome = self.outcome if failure is None else Outcome.ABORTED
        return Decision(self.prefix, Alone.sequence - 1, outcome, failure or "", payloads={0: payload})


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, saves_end_with_their_test: None) -> None:
    monkeypatch.setattr(commitment, "_last", {})
    monkeypatch.setattr(commitment, "_highest", {})
    monkeypatch.setattr(Alone, "sequence", 0)
    monkeypatch.setattr(module, "GrpcBarrier", Alone)


def ddp(**options: Any) -> Any:
    where = {"parallel_devices": [torch.device("cpu")], "cluster_environment": LightningEnvironment()}
    return committed(DDPStrategy(**where), **options)


class Sharded(FSDPStrategy):  # type: ignore[misc]
    """Writes folders, as Lightning's does, but for torch's part."""

    def __init__(self) -> None:
        super().__init__(parallel_devices=[torch.device("cpu")], cluster_environment=LightningEnvironment())
        self.step = 0

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Path, storage_options: Any = None
    ) -> None:
        filepath.mkdir()
        (filepath / "__0_0.distcp").write_text("a shard")
        torch.save(checkpoint, filepath / "rest")

    def load_checkpoint(self, checkpoint_path: Path, weights_only: bool | None = None) -> dict[str, Any]:
        loaded: dict[str, Any] = torch.load(checkpoint_path / "rest", weights_only=True)
        return loaded

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj


def fully_sharded() -> Any:
    return committed(Sharded())


def state(step: int) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"weights": torch.full((10,), float(step))}}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


MADE = [ddp, fully_sharded]


@pytest.mark.parametrize("made", MADE)
def test_what_is_saved_is_loaded_and_the_name_can_be_used_again(tmp_path: Path, made: Any):
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
    [(StagedCheckpoint, "prepare"), (torch, "save"), (module, "_check_shards"), (StagedCheckpoint, "commit")],
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


def test_who_fails_in_a_collective_is_not_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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
def test_whose_part_has_failed_is_to_blame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, error: type[BaseException]
):
    def failing(*_: object, **__: object) -> None:
        raise CheckpointException("write", {rank: (OSError("full"), traceback())})

    monkeypatch.setattr(TorchCheckpointIO, "save_checkpoint", failing)
    with pytest.raises(error):
        ddp().save_checkpoint(state(1), tmp_path / "last.ckpt")


def traceback() -> Any:
    import traceback

    return traceback.extract_stack()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 the beginning of an archive"])
def test_a_file_that_is_torn_is_not_loaded(tmp_path: Path, content: bytes):
    path = tmp_path / "last.ckpt"
    path.write_bytes(content)
    with pytest.raises(UncommittedError, match=r"last\.ckpt is not a whole checkpoint"):
        ddp().load_checkpoint(path)
    assert latest(tmp_path) is None


def test_a_whole_file_is_loaded_whoever_wrote_it(tmp_path: Path):
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


@pytest.mark.parametrize("made", MADE)
def test_all_is_on_the_disk_before_a_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any
):
    synced = Synced.record(monkeypatch)
    strategy, path = made(), tmp_path / "new" / "last.ckpt"
    strategy.save_checkpoint(state(1), path)
    synced.check_committed(path)
    synced.check_made(path.parent)


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


def test_what_another_rank_finds_damaged_is_not_loaded_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    strategy = fully_sharded()
    strategy.save_checkpoint(state(1), tmp_path / "last.ckpt")
    said = iter([True, True, False])
    monkeypatch.setattr(Sharded, "reduce_boolean_decision", lambda *_: next(said))
    with pytest.raises(CorruptCheckpointError, match=r"last\.ckpt is damaged: .* another rank has found it"):
        strategy.load_checkpoint(tmp_path / "last.ckpt")


def test_what_is_replaced_while_it_is_loaded_is_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_who_can_load_does_not_go_on_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    strategy = ddp()
    strategy.save_checkpoint(state(1), tmp_path / "last.ckpt")
    monkeypatch.setattr(DDPStrategy, "reduce_boolean_decision", lambda *_: False)
    with pytest.raises(UncommittedError, match="another rank cannot use"):
        strategy.load_checkpoint(tmp_path / "last.ckpt")


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


def test_what_is_unfinished_is_no_checkpoint_of_the_queueing_system(tmp_path: Path):
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


def test_a_name_that_was_lost_is_given_back_before_training_begins_anew(tmp_path: Path):
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


def test_file_whose_commit_died_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    strategy, path = ddp(), tmp_path / "last.ckpt"
    strategy.save_checkpoint(state(1), path)
    (tmp_path / ".last.ckpt.committed").rename(tmp_path / ".last.ckpt.0-0-fbd8e0f8")
    flip(path)
    with pytest.raises(CorruptCheckpointError):
        strategy.load_checkpoint(path)


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


def test_what_is_no_checkpoint_is_not_replaced_by_one(tmp_path: Path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").touch()
    with pytest.raises(IsADirectoryError, match="data is a folder, and no checkpoint"):
        fully_sharded().save_checkpoint(state(1), tmp_path / "data")
    ddp().save_checkpoint(state(1), tmp_path / "a.ckpt")
    with pytest.raises(FileExistsError, match=r"a\.ckpt is a file, which no rename"):
        fully_sharded().save_checkpoint(state(1), tmp_path / "a.ckpt")
    assert ddp().load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 1


def test_a_file_takes_the_place_of_a_folder(tmp_path: Path):
    fully_sharded().save_checkpoint(state(1), tmp_path / "a.ckpt")
    ddp().save_checkpoint(state(2), tmp_path / "a.ckpt")
    assert ddp().load_checkpoint(tmp_path / "a.ckpt")["global_step"] == 2
    assert names(tmp_path) == {"a.ckpt", ".a.ckpt.committed"}


def test_a_checkpoint_that_is_not_in_a_folder_is_refused():
    with pytest.raises(ValueError, match=r"s3://bucket/a.ckpt is not in a folder"):
        ddp().save_checkpoint(state(1), "s3://bucket/a.ckpt")


def test_what_is_written_later_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
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


def test_a_barrier_of_other_ranks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    barrier: Any = Alone()
    strategy = ddp(barrier=barrier, timeout=5.0, on_lost="abort")
    monkeypatch.setattr(Alone, "world_size", 2)
    with pytest.raises(ValueError, match="is rank 0 of 1 of the trainer, and rank 0 of 2 of the barrier"):
        strategy.save_checkpoint(state(1), tmp_path / "a.ckpt")


def test_what_is_no_strategy_that_can_commit_is_refused():
    for other in ("ddp", DDPStrategy, None):
        given: Any = other
        with pytest.raises(TypeError, match=r"is none of lightning.pytorch's DDPStrategy"):
            committed(given)
    with pytest.raises(ValueError, match="commits its checkpoints already"):
        committed(ddp())
    with pytest.raises(ValueError, match='on_lost = \'exit\': it must be "raise" or "abort"'):
        ddp(on_lost="exit")


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
