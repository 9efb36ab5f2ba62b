"""Files of a local checkpoint, while the keepers that have them come, go and move."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab.patience import PATIENCE
from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.damage import DamageError
from muster.worker.saves.local import kept_source
from muster.worker.saves.local.kept_source import KeptSource
from muster.worker.saves.local.remote_file import RemotePlace

ATTEMPT = SaveAttempt(1, 0)
NAME = "__1_0.distcp"
DATA = b"the bytes of rank 1"
LOST, THERE = RemotePlace(("http://lost:1/f",), "token"), RemotePlace(("http://there:1/f",), "token")


class FakeRemoteFile:
    """A file that every place has but a lost one."""

    def __init__(self, place: RemotePlace, *, verify: bool = False) -> None:
        self.place = place

    def read_into(self, offset: int, buffer: memoryview) -> int:
        if self.place == LOST:
            raise FileNotFoundError("no keeper can send it: connection refused")
        piece = DATA[offset : offset + len(buffer)]
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        pass


class FakeKeeper:
    """Answers with one place after the other."""

    def __init__(self, *places: RemotePlace | Path | Exception) -> None:
        self._places = list(places)
        self.asked: list[tuple[bool, bool]] = []
        """By request: whether bytes were wrong, and whether the file may stay elsewhere."""

    def find(
        self, attempt: SaveAttempt, name: str, timeout: float, *, damaged: bool = False, pieces: bool = True
    ) -> RemotePlace | Path:
        self.asked.append((damaged, pieces))
        place = self._places.pop(0)
        if isinstance(place, Exception):
            raise place
        return place


@pytest.fixture
def source_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[object], KeptSource]:
    monkeypatch.setattr(kept_source, "RemoteFile", FakeRemoteFile)
    return lambda keeper: KeptSource(keeper, ATTEMPT, tmp_path, PATIENCE)  # type: ignore[arg-type]


def test_node_that_has_moved_is_found_through_the_keeper(source_of: Callable[[object], KeptSource]):
    keeper = FakeKeeper(LOST, THERE)
    with source_of(keeper).open(NAME) as file:
        assert file.read(4, 5) == DATA[4:9]
        assert file.read(0, 100) == DATA
    assert keeper.asked == [(False, True), (False, True)]


def test_keeper_fetches_a_file_that_no_node_sends_in_pieces(
    source_of: Callable[[object], KeptSource], tmp_path: Path
):
    (tmp_path / NAME).write_bytes(DATA)
    keeper = FakeKeeper(LOST, LOST, tmp_path / NAME)
    with source_of(keeper).open(NAME) as file:
        assert file.read(0, 100) == DATA
    assert keeper.asked == [(False, True), (False, True), (False, False)]


def test_file_that_the_keeper_cannot_get_counts_as_damaged(source_of: Callable[[object], KeptSource]):
    keeper = FakeKeeper(LOST, LOST, FileNotFoundError("no keeper has it"))
    with pytest.raises(DamageError, match="no keeper has it"), source_of(keeper).open(NAME) as file:
        file.read(0, 100)


def test_fetch_of_one_file_does_not_hold_up_another(source_of: Callable[[object], KeptSource]):
    both = threading.Barrier(2, timeout=PATIENCE)

    class SlowKeeper:
        def find(self, *_: object, **__: object) -> RemotePlace:
            both.wait()  # Until the other file is asked for, too.
            return THERE

    source = source_of(SlowKeeper())

    def read(name: str) -> bytes:
        with source.open(name) as file:
            return file.read(0, 100)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(read, ["a", "b"])) == [DATA, DATA]
