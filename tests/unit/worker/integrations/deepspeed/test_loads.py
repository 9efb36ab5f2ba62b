"""An engine loads only a checkpoint that is committed, whole and the same on all ranks."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from muster.checkpoint import retry
from muster.checkpoint.committed import MARKER, UncommittedError
from muster.checkpoint.damage import CorruptCheckpointError, Damage
from muster.worker.integrations.commit.lookup import REPLACED, Marker, mark_damaged, read
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from muster.worker.integrations.deepspeed import adopt, commit_together
from muster.worker.integrations.deepspeed import engine as module
from muster.worker.integrations.deepspeed.tags import Choice
from tests.support.saves.damage import flip
from tests.unit.worker.integrations.deepspeed.engines import FILE, Engine, content, two_ranks


def test_extra_load_options_are_passed_to_deepspeed(tmp_path: Path, engine: Any):
    engine.save_checkpoint(tmp_path)
    path, state = engine.load_checkpoint(tmp_path, load_module_only=True)
    assert path == str(tmp_path / "global_step7" / FILE)
    assert state["load_module_only"] is True


def test_uncommitted_checkpoint_is_loaded_only_after_adoption(tmp_path: Path, engine: Any):
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
    with pytest.raises(FileNotFoundError, match="nowhere is no checkpoint of DeepSpeed:"):
        adopt(tmp_path / "nowhere")


def test_latest_that_names_a_torn_checkpoint_is_passed_over(
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
    tmp_path: Path, engine: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert "latest is not there, and no checkpoint: nothing is loaded" in caplog.text
    monkeypatch.setattr(retry, "DELAYS", ())
    (tmp_path / "latest").mkdir()
    with pytest.raises(IsADirectoryError, match="latest"):
        engine.load_checkpoint(tmp_path)


def test_without_latest_the_tag_that_was_committed_last_is_loaded(
    tmp_path: Path, engine: Any, caplog: pytest.LogCaptureFixture
):
    for step in (1, 2):
        engine.save_checkpoint(tmp_path, f"step-{step}", {"step": step})
    (tmp_path / "latest").unlink()
    assert content(engine, tmp_path) == "{'step': 2}"
    assert "latest is not there" in caplog.text


def test_damaged_tag_in_a_folder_of_its_own_is_not_loaded(tmp_path: Path, engine: Any):
    engine.save_checkpoint(tmp_path, "epoch-1/step-3", {"step": 3})
    path, marker = read(tmp_path / "epoch-1" / "step-3")
    mark_damaged(path, marker, Damage("", "marked by hand"))
    with pytest.raises(CorruptCheckpointError, match="step-3 is damaged: marked by hand"):
        engine.load_checkpoint(tmp_path)


def test_rank_0_that_finds_nothing_where_another_does_is_an_error_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine: Any = commit_together(Engine())
    engine.save_checkpoint(tmp_path, "last")
    other = two_ranks(monkeypatch, [Choice(None), None])  # Rank 0's host has an empty folder there.
    with pytest.raises(RuntimeError, match=r"rank [01] finds .*/last: the ranks do not see the same folder"):
        other.load_checkpoint(tmp_path)


@pytest.mark.parametrize("fails", [0, 2])
def test_latest_that_cannot_be_read_is_no_start_from_nothing(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch, fails: int
):
    engine.save_checkpoint(tmp_path, "last", {"step": 1})
    monkeypatch.setattr(retry, "DELAYS", (0.0,))
    reads = Path.read_text
    attempts = iter([True] * fails)

    def read_text(path: Path, *arguments: Any, **options: Any) -> str:
        if path.name == "latest" and next(attempts, False):
            raise OSError(errno.EIO, "Input/output error")
        return reads(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    if fails:
        with pytest.raises(OSError, match="Input/output error"):
            engine.load_checkpoint(tmp_path)
    assert content(engine, tmp_path) == "{'step': 1}"


def test_a_marker_that_a_rank_cannot_read_is_not_taken_for_uncommitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine: Any = commit_together(Engine())
    engine.save_checkpoint(tmp_path, "last")
    said = [Choice("last"), (OSError(errno.EIO, "Input/output error"),)]
    with pytest.raises(RuntimeError, match=r"last cannot be loaded: rank 1 failed: .*Input/output"):
        two_ranks(monkeypatch, said).load_checkpoint(tmp_path)


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


def test_checkpoint_that_another_rank_finds_damaged_is_not_loaded(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
):
    engine.save_checkpoint(tmp_path, "last")
    marker, damage = read(tmp_path / "last")[1], Damage("weights", "flipped", rank=0)
    error = CorruptCheckpointError("last is damaged", (damage,))
    said = [Choice("last"), (marker,), (damage, None), Choice(None, error)]
    with pytest.raises(CorruptCheckpointError, match="last is damaged"):
        two_ranks(monkeypatch, said).load_checkpoint(tmp_path)
    assert said == []


def test_checkpoint_that_another_rank_cannot_read_is_not_loaded(
    tmp_path: Path, engine: Any, monkeypatch: pytest.MonkeyPatch
):
    engine.save_checkpoint(tmp_path, "last")
    said = [Choice("last"), (read(tmp_path / "last")[1],), (None, "OSError: [Errno 5]")]
    with pytest.raises(RuntimeError, match=r"last cannot be loaded: rank 1 failed: OSError: \[Errno 5\]"):
        two_ranks(monkeypatch, said).load_checkpoint(tmp_path)


def test_a_replacement_that_was_left_half_way_is_found(tmp_path: Path, engine: Any):
    engine.save_checkpoint(tmp_path, "last", {"step": 1})
    (tmp_path / "last").rename(tmp_path / f".last{REPLACED}")
    assert content(engine, tmp_path) == "{'step': 1}"


def test_load_fails_if_the_checkpoint_is_replaced_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Slow(Engine):
        def load_checkpoint(self, load_dir: str, tag: Any = None, **options: Any) -> Any:
            saved = StagedCheckpoint(tmp_path / "last", 0, 99, "job")
            saved.begin()
            saved.commit(Marker("another", 0, 1, "checkpoint/deepspeed", 99))

    engine: Any = commit_together(Slow())
    engine.save_checkpoint(tmp_path, "last")
    with pytest.raises(RuntimeError, match="last was replaced while it was loaded"):
        engine.load_checkpoint(tmp_path)


def test_all_ranks_refuse_a_checkpoint_that_one_does_not_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    engine: Any = commit_together(Engine())
    engine.save_checkpoint(tmp_path, "last")
    other = two_ranks(monkeypatch, [Choice("last"), (UncommittedError("last is not there"),)])
    with pytest.raises(UncommittedError, match="last is not there"):
        other.load_checkpoint(tmp_path)


def test_universal_checkpoints_are_not_of_a_save(tmp_path: Path):
    (tmp_path / "universal").mkdir()
    (tmp_path / "universal" / FILE).write_text("converted")
    engine: Any = commit_together(Engine(universal=True))
    assert content(engine, tmp_path, "universal") == "converted"
