"""An engine commits each save under its tag; engines that cannot be committed are refused."""

import runpy
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine

from muster.checkpoint.committed import MARKER
from muster.checkpoint.manifest import MANIFEST
from muster.worker.errors import BarrierAbortedError, MusterError
from muster.worker.integrations.commit.lookup import read
from muster.worker.integrations.deepspeed import attach, commit_together
from muster.worker.integrations.deepspeed import engine as module
from tests.support.saves.synced import Synced
from tests.unit.worker.integrations.commit.folder_jobs import names
from tests.unit.worker.integrations.deepspeed.engines import (
    FILE,
    Alone,
    Comm,
    DecoupledCheckpointEngine,
    Engine,
    Writer,
    content,
    full,
    latest,
    two_ranks,
)


def test_saved_checkpoint_is_loaded_and_its_tag_can_be_reused(tmp_path: Path, engine: Any):
    for state in ("one", "two"):
        assert engine.save_checkpoint(tmp_path, tag="last", client_state={"state": state}) is True
        assert content(engine, tmp_path) == content(engine, tmp_path, "last") == str({"state": state})
    assert names(tmp_path) == {"last", "latest"}
    assert read(tmp_path / "last")[1].prefix == "checkpoint/deepspeed"


def test_tags_are_as_deepspeed_makes_them(tmp_path: Path, engine: Any):
    engine.save_checkpoint(str(tmp_path))
    assert latest(tmp_path) == "global_step7"
    engine.save_checkpoint(tmp_path, 12, {"a": 1}, False)
    assert latest(tmp_path) == "global_step7", "it was not to name it"
    assert content(engine, tmp_path, 12) == content(engine, tmp_path, tmp_path / "12") == "{'a': 1}"
    engine.save_checkpoint(tmp_path, "epoch-1/step-3")
    assert content(engine, tmp_path) == "{}"
    assert names(tmp_path) == {"global_step7", "12", "epoch-1", "latest"}


@pytest.mark.parametrize("tag", ["", "..", "a/../b", "/elsewhere", "latest", ".", ".step-1"])
def test_a_tag_that_is_no_name_in_the_folder_is_refused(tmp_path: Path, engine: Any, tag: str):
    with pytest.raises(ValueError, match=r"tag = .*: it must be a name in save_dir"):
        engine.save_checkpoint(tmp_path, tag)
    with pytest.raises(ValueError, match="save_dir = ''"):
        engine.save_checkpoint("", tag)


def test_a_write_that_fails_leaves_what_was_there_and_the_next_save_commits(
    tmp_path: Path, engine: Any, comm: Comm
):
    left: list[str] = []
    engine.optimizer.checkpoint_event_epilogue = lambda: left.append("epilogue")
    engine.save_checkpoint(tmp_path, "last", {"step": 1})
    engine.checkpoint_engine.fault = full()
    with pytest.raises(BarrierAbortedError, match="No space left") as caught:
        engine.save_checkpoint(tmp_path, "last", {"step": 2})
    assert caught.value.__cause__ is engine.checkpoint_engine.fault
    assert (left, comm.barriers) == (["epilogue"], 1), "the others wait where a save ends"
    assert content(engine, tmp_path) == "{'step': 1}"
    engine.checkpoint_engine.fault = None
    engine.save_checkpoint(tmp_path, "next", {"step": 3})
    assert names(tmp_path) == {"last", "next", "latest"}
    assert latest(tmp_path) == "next"


def test_leftover_folders_of_killed_generations_are_swept(tmp_path: Path, engine: Any):
    for left in (".global_step5.0-3", ".removed-1"):
        (tmp_path / left).mkdir()
    (tmp_path / ".mine").mkdir()
    engine.save_checkpoint(tmp_path)
    assert names(tmp_path) == {"global_step7", "latest", ".mine"}


def test_rank_0_that_cannot_make_room_says_so_before_anyone_writes(tmp_path: Path, engine: Any):
    (tmp_path / "out").touch()
    with pytest.raises(BarrierAbortedError, match="out"):
        engine.save_checkpoint(tmp_path / "out" / "in")


def test_a_latest_that_cannot_be_written_is_everyones_error_and_the_last_one_stays(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
):
    engine.save_checkpoint(tmp_path, "one")
    with monkeypatch.context() as patched:
        patched.setattr(module, "_let_latest_name", lambda *_: (_ for _ in ()).throw(full()))
        with pytest.raises(BarrierAbortedError, match="No space left"):
            engine.save_checkpoint(tmp_path, "two")
    assert latest(tmp_path) == "one"
    assert content(engine, tmp_path, "two") == "{}", "it is whole"
    engine.save_checkpoint(tmp_path, "two", {"again": 1})
    assert content(engine, tmp_path) == "{'again': 1}"


@pytest.mark.parametrize(
    "error", [RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), KeyboardInterrupt()]
)
def test_an_error_of_a_collective_is_nobodys_here(tmp_path: Path, engine: Any, error: BaseException):
    engine.checkpoint_engine.fault = error
    if isinstance(error, RuntimeError):
        with pytest.raises(MusterError, match="was given up") as caught:
            engine.save_checkpoint(tmp_path)
        assert caught.value.__cause__ is error
    else:
        with pytest.raises(KeyboardInterrupt):
            engine.save_checkpoint(tmp_path)


def test_ranks_that_give_different_tags_save_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = two_ranks(monkeypatch, [module._Offer("step-1", 0, True), False])
    with pytest.raises(BarrierAbortedError, match="its tag is 'step-2', and rank 0's is 'step-1'"):
        engine.save_checkpoint(tmp_path, "step-2")
    assert names(tmp_path) == set()


def test_ranks_that_do_not_share_the_folder_save_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = two_ranks(monkeypatch, [module._Offer("step-1", 4, True), False])
    with pytest.raises(
        BarrierAbortedError, match=r"\.step-1\.0-4-fbd8e0f8, which rank 0 has made, is not there"
    ):
        engine.save_checkpoint(tmp_path, "step-1")


def test_all_is_on_the_disk_before_a_tag_has_its_name(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
):
    synced = Synced.record(monkeypatch)
    engine.save_checkpoint(tmp_path / "new", "last")
    synced.check_committed(tmp_path / "new" / "last")
    synced.check_made(tmp_path / "new")
    assert names(tmp_path / "new" / "last") == {FILE, MARKER, MANIFEST}


def test_parts_of_a_file_are_put_on_the_disk_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    synced: list[str] = []
    monkeypatch.setattr(module, "sync_file", lambda path: synced.append(path.name))
    for name in ("a-0.2", "a-1.2", "b", "c"):
        (tmp_path / name).touch()
    module._put_on_disk([tmp_path / "a", tmp_path / "b"])
    assert sorted(synced) == ["a-0.2", "a-1.2", "b"]


def test_an_engine_that_could_not_be_committed_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="use_node_local_storage"):
        commit_together(Engine(local=True))

    class DataStates(Writer):
        decoupled = True

    with pytest.raises(ValueError, match="Engine with DataStates: DeepSpeed does not wait"):
        commit_together(Engine(DataStates()))

    class Pipeline(Engine, PipelineEngine):  # type: ignore[misc]
        pass

    commit_together(Pipeline())
    with pytest.raises(ValueError, match="Pipeline with DecoupledCheckpointEngine: DeepSpeed does not wait"):
        commit_together(Pipeline(DecoupledCheckpointEngine()))


def test_bad_input_is_named(engine: Any):
    with pytest.raises(ValueError, match="commits its checkpoints already"):
        commit_together(engine)
    with pytest.raises(TypeError, match="tuple is no DeepSpeedEngine: give the first thing"):
        commit_together((engine, None))
    with pytest.raises(ValueError, match='on_lost = \'exit\': it must be "raise" or "abort"'):
        commit_together(Engine(), on_lost="exit")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout = 0"):
        commit_together(Engine(), timeout=0)
    some_ranks: Any = Alone()
    some_ranks.participants = (0,)
    with pytest.raises(ValueError, match=r"only ranks \[0\], and all ranks of the job write"):
        commit_together(Engine(), barrier=some_ranks)
    other: Any = Alone(1, 4)
    with pytest.raises(ValueError, match="rank 0 of 1 of DeepSpeed, and rank 1 of 4 of the barrier"):
        commit_together(Engine(), barrier=other)


@pytest.mark.parametrize("change", ["gone", "another"])
def test_another_deepspeed_is_named(monkeypatch: pytest.MonkeyPatch, change: str):
    if change == "gone":
        monkeypatch.delattr(DeepSpeedEngine, "_commit_decoupled_checkpoint")
    else:
        monkeypatch.setattr(DeepSpeedEngine, "_commit_decoupled_checkpoint", lambda self, now: None)
    with pytest.raises(
        ImportError, match=r"was tried with DeepSpeed 0\.19\.8; here DeepSpeedEngine\._commit"
    ):
        runpy.run_path(attach.__file__)
