"""Ranks that save and load folders together, and a committed checkpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lab.patience import PATIENCE
from muster.worker.integrations.commit.folders import FolderSaves
from muster.worker.integrations.commit.lookup import Marker
from muster.worker.integrations.commit.numbered import newest
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.fake_group import FakeGroup
from tests.support.saves.scripted_barrier import ScriptedBarrier

T = TypeVar("T")
RANKS = 2


def saves_of(barrier: ScriptedBarrier) -> tuple[FolderSaves, Any]:
    as_barrier: Any = barrier
    return FolderSaves("checkpoint/folders", "folders", as_barrier, 60.0, "raise"), as_barrier


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def checkpoint_in(folder: Path) -> Path:
    """One that all ranks have committed."""
    staged = StagedCheckpoint(folder / "step-1", 0, 0, "job", "folders")
    staged.prepare()
    staged.unfinished.mkdir(exist_ok=True)
    (staged.unfinished / "weights").write_bytes(b"weights")
    staged.commit(Marker("job", 0, 2, "checkpoint/folders", 0))
    return staged.path


class Job:
    """The ranks of a job, in threads of this process."""

    def __init__(self, folder: Path) -> None:
        self.group = FakeGroup(RANKS)
        self.folder = folder
        members: list[Any] = [self.group.member(rank) for rank in range(RANKS)]
        self.ranks = [(FolderSaves("save", "folders", member, 60.0, "raise"), member) for member in members]

    def each(self, do: Callable[[FolderSaves, Any], T]) -> list[T | BaseException]:
        """What all ranks return that do the same, or raise."""
        under_way = [in_thread(partial(do, saves, member)) for saves, member in self.ranks]
        return [one.exception(PATIENCE) or one.result(PATIENCE) for one in under_way]

    def save(self, number: int) -> list[BaseException | None]:
        """All save, each a file of its own."""
        path = self.folder / f"step-{number}"
        return self.each(
            lambda saves, member: saves.save(member, path, partial(self.write, member.rank, number))
        )

    def write(self, rank: int, number: int, unfinished: Path) -> None:
        (unfinished / "shards").mkdir(parents=True, exist_ok=True)
        (unfinished / "shards" / f"rank-{rank}").write_bytes(bytes([number]) * 1000)

    def choose(self) -> list[Path | BaseException]:
        """All load the newest one."""
        return self.each(
            lambda saves, member: saves.choose(member, self.folder, partial(newest, self.folder, "step-"))
        )

    def choose_named(self, number: int) -> list[Path | BaseException]:
        path = self.folder / f"step-{number}"
        return self.each(lambda saves, member: saves.choose_named(member, path))
