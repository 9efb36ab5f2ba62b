"""What an engine of DeepSpeed's saves and loads when it commits, without its collectives."""

import logging
import os
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from muster.checkpoint.committed import MARKER, UncommittedError
from muster.checkpoint.damage import CorruptCheckpointError, Damage
from muster.checkpoint.manifest import MANIFEST
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import BarrierAbortedError, MusterError
from muster.worker.groups.voting import VotingBarrier
from muster.worker.integrations import deepspeed as module
from muster.worker.integrations.commit import commitment
from muster.worker.integrations.commit.lookup import REPLACED, Marker, read
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from muster.worker.integrations.deepspeed import adopt, commit_together
from tests.support.saves.damage import flip
from tests.support.saves.synced import Synced

FILE = "mp_rank_00_model_states.pt"


class Alone(VotingBarrier):
    """The barrier of a job of one rank, which hears no other."""

    prefix, run_id, generation = "checkpoint/deepspeed", "job", 0

    def __init__(self, rank: int = 0, world_size: int = 1, prefix: str = "") -> None:
        self.rank, self.world_size = rank, world_size
        self.sequence = 0

    def vote(
        self,
        failure: str | None = None,
        timeout_secs: float | None = None,
        payload: bytes = b"",
        early: object = None,
        report: object = None,
    ) -> Decision:
        self.sequence += 1
        outcome = Outcome.RELEASED if failure is None else Outcome.ABORTED
        return Decision(self.prefix, self.sequence - 1, outcome, failure or "", payloads={0: payload})


class Comm:
    """DeepSpeed's collectives, of one rank or of two, of which the other one says what the test does."""

    def __init__(self, rank: int = 0, said: list[Any] | None = None) -> None:
        self.rank = rank
        self.said = said
        self.barriers = 0

    def get_rank(self) -> int:
        return self.rank

    def get_world_size(self) -> int:
        return 1 if self.said is None else 2

    def barrier(self) -> None:
        self.barriers += 1

    def broadcast_object_list(self, words: list[Any], src: int) -> None:
        if self.rank != src:
            assert self.said is not None
            words[0] = self.said.pop(0)

    def all_gather_object(self, words: list[Any], mine: Any) -> None:
        words[0] = mine
        if self.said is not None:
            words[1] = self.said.pop(0)


class Writer:
    """A checkpoint engine of DeepSpeed's, the default one."""

    fault: Exception | None = None
    decoupled = False

    def is_decoupled(self) -> bool:
        return self.decoupled

    def save(self, state_dict: Any, path: str) -> None:
        if self.fault is not None:
            raise self.fault
        Path(path).write_text(str(state_dict))


class DecoupledCheckpointEngine(Writer):
    """The one of the same name, as far as it concerns the adapter."""

    decoupled = True


class Engine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's, with a checkpoint of one file."""

    def __init__(self, writer: Writer | None = None, *, local: bool = False, universal: bool = False) -> None:
        nn.Module.__init__(self)
        self.checkpoint_engine = writer or Writer()
        self.optimizer = SimpleNamespace()
        self.global_steps = 7
        self.local, self.universal = local, universal
        self.destroyed = 0
        self.crash: Exception | None = None
        """Of its decoupled writer."""
        self.committed = 0

    def use_node_local_storage(self) -> bool:
        return self.local

    def load_universal_checkpoint(self) -> bool:
        return self.universal

    def save_checkpoint(
        self, save_dir: str, tag: Any = None, client_state: Any = None, *options: bool
    ) -> bool:
        assert options == (False, False)
        self.checkpoint_engine.save(client_state, f"{save_dir}/{tag}/{FILE}")
        return True

    def load_checkpoint(self, load_dir: str, tag: Any = None, **options: Any) -> Any:
        path = Path(load_dir) / tag / FILE
        return str(path), {"content": path.read_text(), **options}

    def _commit_decoupled_checkpoint(self) -> None:
        if self.crash is not None:
            raise self.crash
        self.committed += 1

    def destroy(self) -> None:
        self.destroyed += 1


@pytest.fixture(autouse=True)
def comm(monkeypatch: pytest.MonkeyPatch) -> Comm:
    monkeypatch.setattr(commitment, "_last", {})
    monkeypatch.setattr(commitment, "_highest", {})
    monkeypatch.setattr(module, "GrpcBarrier", Alone)
    monkeypatch.setattr(module, "_swept", set())
    alone = Comm()
    monkeypatch.setattr(module, "comm", alone)
    return alone


@pytest.fixture
def engine() -> Any:
    return commit_together(Engine())


@pytest.fixture
def decoupled() -> Any:
    return commit_together(Engine(DecoupledCheckpointEngine()))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def content(engine: Any, folder: Path, tag: object = None) -> Any:
    return engine.load_checkpoint(folder, tag)[1]["content"]


def latest(folder: Path) -> str:
    return (folder / "latest").read_text()


def full() -> OSError:
    return OSError(28, "No space left on device")


def test_what_is_saved_is_loaded_and_the_tag_can_be_used_again(tmp_path: Path, engine: Any):
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


def test_what_a_load_is_asked_for_besides_is_passed_on(tmp_path: Path, engine: Any):
    engine.save_checkpoint(tmp_path)
    path, state = engine.load_checkpoint(tmp_path, load_module_only=True)
    assert path == str(tmp_path / "global_step7" / FILE)
    assert state["load_module_only"] is True


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


def test_what_lives_that_were_killed_have_left_is_swept(tmp_path: Path, engine: Any):
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


def two_ranks(monkeypatch: pytest.MonkeyPatch, said: list[Any]) -> Any:
    monkeypatch.setattr(module, "comm", Comm(1, said))
    return commit_together(Engine())


def test_ranks_that_give_different_tags_save_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = two_ranks(monkeypatch, [module._Offer("step-1", 0, None), False])
    with pytest.raises(BarrierAbortedError, match="its tag is 'step-2', and rank 0's is 'step-1'"):
        engine.save_checkpoint(tmp_path, "step-2")
    assert names(tmp_path) == set()


def test_ranks_that_do_not_share_the_folder_save_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = two_ranks(monkeypatch, [module._Offer("step-1", 4, None), False])
    with pytest.raises(
        BarrierAbortedError, match=r"\.step-1\.0-4-fbd8e0f8, which rank 0 has made, is not there"
    ):
        engine.save_checkpoint(tmp_path, "step-1")


def test_what_was_not_committed_is_not_loaded_unless_it_is_adopted(tmp_path: Path, engine: Any):
    old = tmp_path / "global_step5"
    old.mkdir()
    (old / FILE).write_text("old")
    (tmp_path / "latest").write_text("global_step5\n")
    for tag in (None, "global_step5"):
        with pytest.raises(UncommittedError, match=r'global_step5 is not .*adopt\("/.*/global_step5"\)'):
            engine.load_checkpoint(tmp_path, tag)
    adopt(old)
    assert content(engine, tmp_path) == "old"
    with pytest.raises(FileExistsError, match="global_step5 is committed"):
        adopt(old)
    with pytest.raises(FileNotFoundError, match="nowhere is no checkpoint of DeepSpeed's"):
        adopt(tmp_path / "nowhere")


def test_a_latest_that_names_what_is_torn_is_passed_over(
    tmp_path: Path, engine: Any, caplog: pytest.LogCaptureFixture
):
    engine.save_checkpoint(tmp_path, "good", {"step": 1})
    (tmp_path / "torn").mkdir()
    (tmp_path / "latest").write_text("torn")
    assert content(engine, tmp_path) == "{'step': 1}"
    assert "torn is passed over" in caplog.text
    with pytest.raises(UncommittedError, match="torn is not a committed checkpoint"):
        engine.load_checkpoint(tmp_path, "torn")


def test_where_nothing_was_saved_nothing_is_loaded(
    tmp_path: Path, engine: Any, caplog: pytest.LogCaptureFixture
):
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "latest is not there: nothing is loaded" in caplog.text
    (tmp_path / "latest").mkdir()
    with pytest.raises(IsADirectoryError, match="latest"):
        engine.load_checkpoint(tmp_path)


def test_all_is_on_the_disk_before_a_tag_has_its_name(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
):
    synced = Synced.record(monkeypatch)
    engine.save_checkpoint(tmp_path / "new", "last")
    synced.check_committed(tmp_path / "new" / "last")
    synced.check_made(tmp_path / "new")
    assert names(tmp_path / "new" / "last") == {FILE, MARKER, MANIFEST}


def test_a_damaged_tag_is_passed_over_unless_it_was_named(
    tmp_path: Path, engine: Any, caplog: pytest.LogCaptureFixture
):
    for step in (1, 2, 3):
        engine.save_checkpoint(tmp_path, f"step-{step}", {"step": step})
        os.utime(tmp_path / f"step-{step}" / MARKER, (-step, -step))
    flip(tmp_path / "step-3" / FILE)
    assert content(engine, tmp_path) == "{'step': 2}"
    assert "step-3 is passed over, since it is damaged" in caplog.text
    flip(tmp_path / "step-2" / FILE)
    for _ in range(2):
        with pytest.raises(CorruptCheckpointError, match=rf"step-2 is damaged: {FILE} at offset 0: "):
            engine.load_checkpoint(tmp_path, "step-2")
    assert content(engine, tmp_path) == "{'step': 1}"
    flip(tmp_path / "step-1" / FILE)
    with pytest.raises(CorruptCheckpointError, match="all committed checkpoints are damaged"):
        engine.load_checkpoint(tmp_path)
    engine.save_checkpoint(tmp_path, "step-2", {"step": 22})
    assert content(engine, tmp_path) == "{'step': 22}"


def test_damage_that_cannot_be_recorded_is_passed_over_nevertheless(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
):
    for tag in ("one", "two"):
        engine.save_checkpoint(tmp_path, tag, {"tag": tag})
    monkeypatch.setattr(module, "mark_damaged", lambda *_: None)
    flip(tmp_path / "two" / FILE)
    assert content(engine, tmp_path) == "{'tag': 'one'}"
    flip(tmp_path / "one" / FILE)
    with pytest.raises(CorruptCheckpointError, match="one is damaged"):
        engine.load_checkpoint(tmp_path)


def test_what_another_rank_finds_damaged_is_not_loaded_here(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
):
    engine.save_checkpoint(tmp_path, "last")
    marker, damage = read(tmp_path / "last")[1], Damage("weights", "flipped", rank=0)
    error = CorruptCheckpointError("last is damaged", (damage,))
    said = [module._Choice("last"), (marker,), (damage, None), module._Choice(None, error)]
    with pytest.raises(CorruptCheckpointError, match="last is damaged"):
        two_ranks(monkeypatch, said).load_checkpoint(tmp_path)
    assert said == []


def test_what_another_rank_cannot_read_is_loaded_by_none(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
):
    engine.save_checkpoint(tmp_path, "last")
    said = [module._Choice("last"), (read(tmp_path / "last")[1],), (None, "OSError: [Errno 5]")]
    with pytest.raises(RuntimeError, match=r"last cannot be loaded: rank 1 failed: OSError: \[Errno 5\]"):
        two_ranks(monkeypatch, said).load_checkpoint(tmp_path)


def test_a_replacement_that_was_left_half_way_is_found(tmp_path: Path, engine: Any):
    engine.save_checkpoint(tmp_path, "last", {"step": 1})
    (tmp_path / "last").rename(tmp_path / f".last{REPLACED}")
    assert content(engine, tmp_path) == "{'step': 1}"


def test_what_is_replaced_while_it_is_loaded_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Slow(Engine):
        def load_checkpoint(self, load_dir: str, tag: Any = None, **options: Any) -> Any:
            saved = StagedCheckpoint(tmp_path / "last", 0, 99, "job")
            saved.begin()
            saved.commit(Marker("another", 0, 1, "checkpoint/deepspeed", 99))

    engine: Any = commit_together(Slow())
    engine.save_checkpoint(tmp_path, "last")
    with pytest.raises(RuntimeError, match="last was replaced while it was loaded"):
        engine.load_checkpoint(tmp_path)


def test_all_ranks_refuse_what_one_does_not_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine: Any = commit_together(Engine())
    engine.save_checkpoint(tmp_path, "last")
    other = two_ranks(monkeypatch, [module._Choice("last"), ("last is not there",)])
    with pytest.raises(UncommittedError, match="last is not there"):
        other.load_checkpoint(tmp_path)


def test_universal_checkpoints_are_not_of_a_save(tmp_path: Path):
    (tmp_path / "universal").mkdir()
    (tmp_path / "universal" / FILE).write_text("converted")
    engine: Any = commit_together(Engine(universal=True))
    assert content(engine, tmp_path, "universal") == "converted"


def test_a_decoupled_save_is_committed_before_the_next_step(tmp_path: Path, decoupled: Any):
    decoupled.save_checkpoint(tmp_path, "one")
    assert names(tmp_path) == {".one.0-0-fbd8e0f8"}
    decoupled._commit_decoupled_checkpoint()
    assert names(tmp_path) == {"one", "latest"}
    decoupled._commit_decoupled_checkpoint()
    assert decoupled.committed == 3, "at the save, at the step, and at the next one"


def test_a_decoupled_save_is_committed_before_another_one_a_load_and_the_end(tmp_path: Path, decoupled: Any):
    for tag in ("one", "two", "three"):
        decoupled.save_checkpoint(tmp_path, tag)
    assert latest(tmp_path) == "two"
    assert content(decoupled, tmp_path) == "{}"
    assert latest(tmp_path) == "three"
    decoupled.save_checkpoint(tmp_path, "four")
    decoupled.destroy()
    assert latest(tmp_path) == "four"
    assert decoupled.destroyed == 1
    assert names(tmp_path) == {"one", "two", "three", "four", "latest"}


def test_a_decoupled_writer_that_fails_is_everyones_error(tmp_path: Path, decoupled: Any):
    decoupled.save_checkpoint(tmp_path, "one")
    decoupled._commit_decoupled_checkpoint()
    decoupled.save_checkpoint(tmp_path, "two")
    decoupled.crash = RuntimeError("checkpoint process is not running")
    with pytest.raises(BarrierAbortedError, match="process is not running"):
        decoupled._commit_decoupled_checkpoint()
    assert latest(tmp_path) == "one"
    with pytest.raises(RuntimeError, match="process is not running"):
        decoupled.destroy()
    assert decoupled.destroyed == 1


def test_a_decoupled_save_that_a_rank_cannot_begin_is_its_error_again_where_the_others_hear_of_it(
    tmp_path: Path, decoupled: Any
):
    decoupled.checkpoint_engine.fault = full()
    with pytest.raises(BarrierAbortedError, match="No space left"):
        decoupled.save_checkpoint(tmp_path)
    decoupled.checkpoint_engine.fault = None
    with pytest.raises(BarrierAbortedError, match="No space left"):
        decoupled._commit_decoupled_checkpoint()
    decoupled.save_checkpoint(tmp_path)
    decoupled.destroy()
    assert names(tmp_path) == {"global_step7", "latest"}


def test_an_engine_that_is_destroyed_in_an_exception_waits_for_nobody(
    tmp_path: Path, decoupled: Any, caplog: pytest.LogCaptureFixture
):
    decoupled.save_checkpoint(tmp_path, "one")
    with pytest.raises(KeyError):
        try:
            raise KeyError("a batch")
        finally:
            decoupled.destroy()
    assert (decoupled.destroyed, decoupled.committed) == (1, 1)
    with caplog.at_level(logging.ERROR):
        next(iter(commitment._last.values())).join(5.0)
    assert "was given up" in caplog.text
    assert names(tmp_path) == {".one.0-0-fbd8e0f8"}


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
        runpy.run_path(module.__file__)
