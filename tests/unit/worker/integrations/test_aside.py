"""Checkpoints that have their name when they are committed, and not before."""

import os
import shutil
from pathlib import Path

import pytest

from muster.worker.integrations.aside import REPLACED, Aside, Marker, committed, latest
from muster.worker.saves.directory import MARKER, UncommittedError


def marker(sequence: int = 7) -> Marker:
    return Marker("job", 0, 2, "checkpoint/dcp", sequence)


def saved(path: Path, content: str, number: int = 1) -> None:
    aside = Aside(path, 0, number)
    aside.begin()
    aside.unfinished.mkdir()
    (aside.unfinished / "part").write_text(content)
    aside.commit(marker())


def content(path: Path) -> str:
    return (committed(path) / "part").read_text()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_is_committed_has_its_name_and_nothing_else_is_there(tmp_path: Path):
    saved(tmp_path / "far" / "last", "one")
    assert content(tmp_path / "far" / "last") == "one"
    assert names(tmp_path / "far") == {"last"}


def test_another_of_the_same_name_takes_its_place(tmp_path: Path):
    saved(tmp_path / "last", "one")
    saved(tmp_path / "last", "two", 2)
    assert content(tmp_path / "last") == "two"
    assert names(tmp_path) == {"last"}


@pytest.mark.parametrize("renamed", [0, 1])
def test_whoever_commits_may_die_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: int):
    path = tmp_path / "last"
    saved(path, "one")
    rename = Path.rename
    done: list[Path] = []

    def dying(self: Path, target: Path) -> Path:
        if len(done) == renamed:
            raise KeyboardInterrupt
        done.append(target)
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", dying)
        with pytest.raises(KeyboardInterrupt):
            saved(path, "two", 2)
    assert content(path) == "one"
    assert latest(tmp_path) == path
    Aside(path, 1, 0).begin()
    assert names(tmp_path) == {"last"}
    assert content(path) == "one"


def test_whoever_commits_may_die_before_it_has_removed_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "last"
    saved(path, "one")
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)
        saved(path, "two", 2)
    assert names(tmp_path) == {"last", f".last{REPLACED}"}
    assert content(path) == "two"
    saved(path, "three", 3)
    assert content(path) == "three"
    assert names(tmp_path) == {"last"}


def test_what_was_not_committed_is_not_loaded_and_is_swept(tmp_path: Path):
    path = tmp_path / "last"
    aside = Aside(path, 0, 1)
    aside.begin()
    aside.unfinished.mkdir()
    with pytest.raises(UncommittedError, match=r"last is not a committed checkpoint: .*No such file"):
        committed(path)
    assert latest(tmp_path) is None
    saved(path, "two", 2)
    assert names(tmp_path) == {"last"}


def test_what_others_write_there_is_left_alone(tmp_path: Path):
    others = [Aside(tmp_path / name, 0, 1).unfinished for name in ("last.2", "las", "last[1]")]
    for other in others:
        other.mkdir()
    (tmp_path / ".last.txt").touch()
    saved(tmp_path / "last", "one", 2)
    assert all(other.is_dir() for other in others)
    assert (tmp_path / ".last.txt").exists()


@pytest.mark.parametrize("said", ["", "[]", "{}", '{"run_id": "job"}', "\xff"])
def test_a_marker_that_is_none_is_named(tmp_path: Path, said: str):
    saved(tmp_path / "last", "one")
    (tmp_path / "last" / MARKER).write_text(said)
    with pytest.raises(UncommittedError, match="last is not a committed checkpoint"):
        committed(tmp_path / "last")
    assert latest(tmp_path) is None


def test_the_latest_is_what_was_committed_last(tmp_path: Path):
    assert latest(tmp_path / "nowhere") is None
    for number, name in enumerate(("step-20", "step-3")):
        saved(tmp_path / name, name, number)
        os.utime(tmp_path / name / MARKER, (number, number))
    (tmp_path / "step-99").mkdir()
    assert latest(tmp_path) == tmp_path / "step-3"
