"""All ranks hear the same of the newest checkpoint, or all fail."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.checkpoint.damage import CorruptCheckpointError, Damage
from muster.worker.decision import Outcome
from muster.worker.errors import BarrierAbortedError, MusterError, OutcomeUnknownError
from muster.worker.integrations.commit import folders
from muster.worker.integrations.commit.agreed import agree_on_newest
from muster.worker.integrations.commit.lookup import mark_damaged, newest, read, replaced_name
from muster.worker.integrations.commit.numbered import newest as newest_number
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.fake_group import FakeGroup
from tests.unit.worker.integrations.commit.folder_jobs import checkpoint_in


def agreed(*folders: Path) -> list[Path | BaseException | None]:
    """What each rank is told; each looks in a folder of its own."""
    group = FakeGroup(len(folders))
    results = []
    for rank, folder in enumerate(folders):
        member: Any = group.member(rank)
        results.append(in_thread(partial(agree_on_newest, folder, partial(newest, folder), member)))
    return [result.exception(PATIENCE) or result.result(PATIENCE) for result in results]


def test_all_ranks_are_told_of_the_newest(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    assert agreed(tmp_path, tmp_path, tmp_path) == [path, path, path]


def test_all_ranks_are_told_that_there_is_none(tmp_path: Path):
    assert agreed(tmp_path, tmp_path / "missing") == [None, None]


def test_checkpoints_that_were_not_committed_are_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "checkpoint-20").mkdir()
    find = partial(newest_number, tmp_path, "checkpoint-")
    group = FakeGroup(2)
    members: list[Any] = [group.member(rank) for rank in range(2)]
    ranks = [in_thread(partial(agree_on_newest, tmp_path, find, member)) for member in members]
    assert [rank.result(PATIENCE) for rank in ranks] == [None, None]
    (warning,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert "saved without Muster: checkpoint-20" in warning


@pytest.mark.parametrize("without", [0, 1])
def test_rank_that_does_not_see_the_checkpoint_fails_all(tmp_path: Path, without: int):
    seen = tmp_path / "share"
    seen.mkdir()
    checkpoint_in(seen)
    folders = [seen, seen]
    folders[without] = tmp_path / "not-mounted"
    results = agreed(*folders)
    assert isinstance(results[1 - without], (OSError, BarrierAbortedError)), results
    assert all(isinstance(one, Exception) for one in results), results


def test_checkpoint_that_is_being_replaced_has_its_own_name(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    path.rename(replaced_name(path))
    assert agreed(tmp_path, tmp_path) == [path, path]


def test_repeated_call_during_a_choice_fails_all_ranks(tmp_path: Path):
    """Rank 0 sees an empty folder. Rank 1 sees a checkpoint, and cannot say so, since it is cut off."""
    share, empty = tmp_path / "share", tmp_path / "empty"
    share.mkdir()
    empty.mkdir()
    checkpoint_in(share)
    group = FakeGroup(2)
    members: list[Any] = [group.member(rank) for rank in range(2)]
    members[1].raises = {1: [OutcomeUnknownError("away", "save", 1, Outcome.UNKNOWN)]}
    first = in_thread(partial(agree_on_newest, empty, partial(newest, empty), members[0]))
    look = partial(agree_on_newest, share, partial(newest, share), members[1])
    with pytest.raises(OutcomeUnknownError):
        look()
    with pytest.raises(MusterError, match="Restart the job on all ranks"):
        look()
    # The group of another process, which knows nothing of the first call.
    folders._unfinished_loads.clear()
    again = in_thread(look)
    assert "out of step" in str(first.exception(PATIENCE))
    assert "they do not see the same folder" in str(again.exception(PATIENCE))


def test_all_ranks_raise_if_all_checkpoints_are_damaged(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    mark_damaged(path, read(path)[1], Damage("weights", "flipped"))
    assert [type(one) for one in agreed(tmp_path, tmp_path)] == [CorruptCheckpointError] * 2
