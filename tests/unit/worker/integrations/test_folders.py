"""Folders that all ranks commit, without a coordinator: who arrives at which barrier."""

import os
from pathlib import Path
from typing import Any

import pytest

from muster.worker.decision import Outcome
from muster.worker.errors import BarrierAbortedError, MusterError
from muster.worker.integrations import commitment as module
from muster.worker.integrations.aside import Aside, Marker
from muster.worker.integrations.commitment import DONE
from muster.worker.integrations.folders import FolderSaves
from tests.support.fake_barrier import FakeBarrier, decided
from tests.support.meeting import in_thread
from tests.support.patience import PATIENCE


@pytest.fixture(autouse=True)
def _nobody_saved_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_last", {})


def saves_of(barrier: FakeBarrier) -> tuple[FolderSaves, Any]:
    as_barrier: Any = barrier
    return FolderSaves("checkpoint/folders", "folders", as_barrier, 60.0, "raise"), as_barrier


def checkpoint_in(folder: Path) -> Path:
    """One that all ranks have committed."""
    aside = Aside(folder / "step-1", 0, 0, "folders")
    aside.prepare()
    aside.unfinished.mkdir(exist_ok=True)
    (aside.unfinished / "weights").write_bytes(b"weights")
    aside.commit(Marker("job", 0, 2, "checkpoint/folders", 0))
    return aside.path


def test_a_rank_whose_save_fails_loads_when_that_is_known_to_all(tmp_path: Path):
    """Else it arrived at the barrier of the save that it says, by its other thread, has failed."""
    path = checkpoint_in(tmp_path)
    barrier = FakeBarrier(rank=1)
    saves, as_barrier = saves_of(barrier)

    def write(_: Path) -> None:
        raise OSError(28, "No space left on device")

    def save_and_load() -> Path:
        with pytest.raises(OSError, match="No space left"):
            saves.save(as_barrier, tmp_path / "step-2", write)
        return saves.choose(as_barrier, lambda: path)

    loaded = in_thread(save_and_load)
    assert barrier.heard() == DONE, "it begins"
    barrier.answers.put(decided())
    failure = barrier.heard()
    assert isinstance(failure, str), "not the first word of its load"
    assert "No space left on device" in failure
    assert barrier.said.empty()
    barrier.answers.put(decided(Outcome.ABORTED))
    for said in (b".", os.fsencode(path)):
        assert barrier.heard() == said
        barrier.answers.put(decided(rank_0=os.fsencode(path), rank_1=said))
    assert loaded.result(PATIENCE) == path


def test_nothing_is_loaded_where_others_make_a_save(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    for rank, words in ((0, decided(rank_0=b".")), (1, decided(rank_1=b"."))):
        barrier = FakeBarrier(rank)
        saves, as_barrier = saves_of(barrier)
        barrier.answers.put(words)
        with pytest.raises(MusterError, match=r"out of step .* some make a save where others load"):
            saves.choose(as_barrier, lambda: path)


def test_what_one_rank_cannot_load_none_does(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    barrier = FakeBarrier(rank=1)
    saves, as_barrier = saves_of(barrier)
    barrier.answers.put(decided(Outcome.ABORTED))
    with pytest.raises(BarrierAbortedError, match="is to blame"):
        saves.choose(as_barrier, lambda: path)
