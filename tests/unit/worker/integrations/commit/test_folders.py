"""Folders that all ranks commit, without a coordinator: who arrives at which barrier."""

import errno
import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest

from lab.patience import PATIENCE
from muster.checkpoint.committed import MARKER
from muster.checkpoint.damage import DAMAGED, KEPT, CorruptCheckpointError, Damage
from muster.checkpoint.digest import digest_of
from muster.checkpoint.manifest import MANIFEST, Manifest, ManifestReference
from muster.worker.decision import Outcome
from muster.worker.errors import BarrierAbortedError, MemberLostError, MusterError, OutcomeUnknownError
from muster.worker.integrations.commit import commitment as module
from muster.worker.integrations.commit import contents, folders
from muster.worker.integrations.commit.contents import encoded, leave_note
from muster.worker.integrations.commit.folders import FolderSaves, newest, numbered, rotate
from muster.worker.integrations.commit.lookup import Marker, mark_damaged, read
from muster.worker.integrations.commit.staged_checkpoint import StagedCheckpoint
from muster.worker.integrations.commit.words import BEGINS
from tests.support.hostile.mine import Mine
from tests.support.meeting import in_thread
from tests.support.saves.damage import flip
from tests.support.saves.round_table import RoundTable
from tests.support.saves.scripted_barrier import FakeBarrier, decided
from tests.support.saves.synced import Synced

T = TypeVar("T")
RANKS = 2


@pytest.fixture(autouse=True)
def _nobody_saved_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_last", {})
    monkeypatch.setattr(module, "_highest", {})


def saves_of(barrier: FakeBarrier) -> tuple[FolderSaves, Any]:
    as_barrier: Any = barrier
    return FolderSaves("checkpoint/folders", "folders", as_barrier, 60.0, "raise"), as_barrier


def checkpoint_in(folder: Path) -> Path:
    """One that all ranks have committed."""
    staged = StagedCheckpoint(folder / "step-1", 0, 0, "job", "folders")
    staged.prepare()
    staged.unfinished.mkdir(exist_ok=True)
    (staged.unfinished / "weights").write_bytes(b"weights")
    staged.commit(Marker("job", 0, 2, "checkpoint/folders", 0))
    return staged.path


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
        return saves.choose(as_barrier, tmp_path, lambda _: path)

    loaded = in_thread(save_and_load)
    assert barrier.heard() == BEGINS + b"step-2"
    barrier.answers.put(decided())
    failure = barrier.heard()
    assert isinstance(failure, str), "not the first word of its load"
    assert "No space left on device" in failure
    assert barrier.said.empty()
    barrier.answers.put(decided(Outcome.ABORTED))
    assert barrier.heard() == b"."
    barrier.answers.put(decided(rank_0=os.fsencode(path.name), rank_1=b"."))
    marker = barrier.heard()
    assert isinstance(marker, bytes)
    barrier.answers.put(decided(rank_0=marker, rank_1=marker))
    assert loaded.result(PATIENCE) == path


def test_nothing_is_loaded_where_others_make_a_save(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    for rank, words in ((0, decided(rank_0=b".")), (1, decided(rank_1=b"."))):
        barrier = FakeBarrier(rank)
        saves, as_barrier = saves_of(barrier)
        barrier.answers.put(words)
        with pytest.raises(MusterError, match=r"out of step .* some make a save where others load"):
            saves.choose(as_barrier, tmp_path, lambda _: path)


def test_nothing_is_loaded_where_a_rank_sees_another_checkpoint(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    barrier = FakeBarrier(rank=1)
    saves, as_barrier = saves_of(barrier)
    barrier.answers.put(decided(rank_0=os.fsencode(path.name), rank_1=b"."))
    barrier.answers.put(decided(rank_0=b"another", rank_1=repr(read(path)[1]).encode()))
    with pytest.raises(RuntimeError, match="is not the same checkpoint to all ranks"):
        saves.choose(as_barrier, tmp_path, lambda _: path)


@pytest.mark.parametrize("told", ["/elsewhere/step-1", "../elsewhere/step-1", ".."])
def test_name_that_leads_out_of_the_folder_is_not_loaded(tmp_path: Path, told: str):
    """Whoever can speak as rank 0 chooses among the checkpoints of the job, and no other file."""
    told = told.replace("/elsewhere", str(tmp_path / "elsewhere")) if told.startswith("/") else told
    checkpoint_in(tmp_path / "elsewhere")
    checkpoint_in(tmp_path / "job")
    barrier = FakeBarrier(rank=1)
    saves, as_barrier = saves_of(barrier)
    barrier.answers.put(decided(rank_0=os.fsencode(told), rank_1=b"."))
    barrier.answers.put(decided(Outcome.ABORTED))
    with pytest.raises(ValueError, match="that is no name in a folder"):
        saves.choose(as_barrier, tmp_path / "job", lambda _: None)
    assert barrier.heard() == b"."
    assert "that is no name in a folder" in str(barrier.heard()), "the other ranks do not hear why"


def test_link_out_of_the_folder_is_not_loaded(tmp_path: Path):
    path = checkpoint_in(tmp_path / "elsewhere")
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "step-1").symlink_to(path)
    heard = Job(tmp_path / "job").choose()
    assert all("is a link to" in str(one) and "outside of its folder" in str(one) for one in heard)


def test_link_that_the_script_names_is_followed(tmp_path: Path):
    path = checkpoint_in(tmp_path / "elsewhere")
    (tmp_path / "step-7").symlink_to(path)
    assert Job(tmp_path).choose_named(7) == [path] * RANKS


@pytest.mark.parametrize("rank", [0, 1])
def test_where_rank_0_finds_none_all_hear_that(rank: int):
    barrier = FakeBarrier(rank)
    saves, as_barrier = saves_of(barrier)
    barrier.answers.put(decided(rank_0=b"/", rank_1=b"."))
    assert saves.choose_any(as_barrier, Path(), lambda _: None) is None
    assert barrier.heard() == (b"/", b".")[rank]


def test_rank_0_alone_cannot_say_that_there_is_none(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    job = Job(tmp_path)
    heard = job.each(
        lambda saves, seat: saves.choose_any(
            seat, tmp_path, lambda _: None, look=lambda _: newest(tmp_path, "step-")
        )
    )
    assert isinstance(heard[0], BarrierAbortedError)
    assert f"rank 0 finds no checkpoint, and rank 1 finds {path}" in str(heard[1])
    assert (
        job.each(lambda saves, seat: saves.choose_any(seat, tmp_path, lambda _: None, look=lambda _: None))
        == [None] * RANKS
    )


def saved_by_rank_0(barrier: FakeBarrier, folder: Path, others: Callable[[Path], None]) -> Future[None]:
    """Rank 0 saves; what the others do to the place where all write is the test's."""
    saves, as_barrier = saves_of(barrier)

    def write(unfinished: Path) -> None:
        unfinished.mkdir(parents=True, exist_ok=True)
        (unfinished / "weights").write_bytes(b"weights")
        others(unfinished.parent)

    for _ in range(4):
        barrier.answers.put(decided())
    return in_thread(lambda: saves.save(as_barrier, folder / "step-1", write))


def test_what_all_have_written_is_committed(tmp_path: Path):
    barrier = FakeBarrier(rank=0)

    def as_rank_1(place: Path) -> None:
        (place / ".part-1").touch()
        leave_note(place / "step-1", 1, encoded({}))

    saved_by_rank_0(barrier, tmp_path, as_rank_1).result(PATIENCE)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert read(tmp_path / "step-1")[1].world_size == 2
    assert {path.name for path in (tmp_path / "step-1").iterdir()} == {"weights", MARKER, MANIFEST}


def test_what_a_rank_has_written_elsewhere_is_not_committed_whatever_it_says(tmp_path: Path):
    barrier = FakeBarrier(rank=0)
    saved = saved_by_rank_0(barrier, tmp_path, lambda _: None)
    with pytest.raises(
        OSError, match=r"what ranks \[1\] have written is not in .*: they do not share the folder"
    ):
        saved.result(PATIENCE)
    assert not (tmp_path / "step-1").exists()


def test_other_jobs_write_beside_it(tmp_path: Path):
    barriers = [FakeBarrier(rank=0), FakeBarrier(rank=0)]
    barriers[1].run_id = "another"
    places: list[Path] = []
    for barrier in barriers:
        for path in (tmp_path / "step-1",):
            saved_by_rank_0(barrier, tmp_path, places.append).exception(PATIENCE)
            assert not path.exists()
    assert len(set(places)) == 2


def test_rotation_keeps_what_was_committed_last_whatever_its_number(tmp_path: Path):
    made: list[Path] = []
    for number in (5, 6, 0):
        staged = StagedCheckpoint(tmp_path / f"checkpoint_{number}", 0, number, "job", "folders")
        staged.begin()
        staged.commit(Marker("job", 0, 2, "checkpoint/folders", 0))
        os.utime(staged.path / MARKER, (-len(made), -len(made)))  # As a copy has another time.
        made.append(staged.path)
    assert [one.found.marker.order for one in numbered(tmp_path, "checkpoint_") if one.found.marker] == [
        1,
        2,
        3,
    ]
    assert newest(tmp_path, "checkpoint_") == made[-1]
    rotate(tmp_path, "checkpoint_", 2, {made[-1]})
    assert [path.exists() for path in made] == [False, True, True]
    rotate(tmp_path, "checkpoint_", 1, {made[1], made[-1]})
    assert [path.exists() for path in made] == [False, True, True]


def test_what_one_rank_cannot_load_none_does(tmp_path: Path):
    path = checkpoint_in(tmp_path)
    barrier = FakeBarrier(rank=1)
    saves, as_barrier = saves_of(barrier)
    barrier.answers.put(decided(Outcome.ABORTED))
    with pytest.raises(BarrierAbortedError, match="is to blame"):
        saves.choose(as_barrier, tmp_path, lambda _: path)


def test_ranks_that_the_framework_has_left_alone_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    saves = FolderSaves("checkpoint/folders", "folders", None, 60.0, "raise")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=2, and each of these ranks would train and save alone"):
        saves.meet(0, 1)


# ---------------------------------------------------------------------- digests, of all ranks together


class Job:
    """The ranks of a job, in threads of this process."""

    def __init__(self, folder: Path) -> None:
        self.table = RoundTable(RANKS)
        self.folder = folder
        seats: list[Any] = [self.table.seat(rank) for rank in range(RANKS)]
        self.ranks = [(FolderSaves("save", "folders", seat, 60.0, "raise"), seat) for seat in seats]

    def each(self, do: Callable[[FolderSaves, Any], T]) -> list[T | BaseException]:
        """What all ranks return that do the same, or raise."""
        under_way = [in_thread(partial(do, saves, seat)) for saves, seat in self.ranks]
        return [one.exception(PATIENCE) or one.result(PATIENCE) for one in under_way]

    def save(self, number: int) -> list[BaseException | None]:
        """All save, each a file of its own."""
        path = self.folder / f"step-{number}"
        return self.each(lambda saves, seat: saves.save(seat, path, partial(self.write, seat.rank, number)))

    def write(self, rank: int, number: int, unfinished: Path) -> None:
        (unfinished / "shards").mkdir(parents=True, exist_ok=True)
        (unfinished / "shards" / f"rank-{rank}").write_bytes(bytes([number]) * 1000)

    def choose(self) -> list[Path | BaseException]:
        """All load the newest one."""
        return self.each(
            lambda saves, seat: saves.choose(seat, self.folder, partial(newest, self.folder, "step-"))
        )

    def choose_named(self, number: int) -> list[Path | BaseException]:
        path = self.folder / f"step-{number}"
        return self.each(lambda saves, seat: saves.choose_named(seat, path))


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "new" / "job")


AWAY = OutcomeUnknownError("the coordinator is away", "save", 0, Outcome.UNKNOWN)


@pytest.mark.parametrize("barrier", [0, 1])
def test_choice_after_one_whose_end_is_unknown_goes_on_or_says_what_to_do(job: Job, barrier: int):
    job.save(1)
    seat = job.ranks[1][1]
    seat.raises = {seat.sequence + barrier: [AWAY]}

    def choose(saves: FolderSaves, seat: Any) -> Path:
        find = partial(newest, job.folder, "step-")
        if seat.rank == 1:
            with pytest.raises(OutcomeUnknownError):
                saves.choose(seat, job.folder, find)
        try:
            return saves.choose(seat, job.folder, find)
        finally:
            if seat.rank == 1 and barrier:
                job.table.lose(1)

    heard = job.each(choose)
    if barrier:
        assert [type(one) for one in heard] == [MemberLostError, MusterError]
        assert "Restart the job on all ranks" in str(heard[1])
    else:
        assert heard == [job.folder / "step-1"] * RANKS


def test_a_manifest_says_what_all_have_written(job: Job, monkeypatch: pytest.MonkeyPatch):
    digested: dict[int, set[str]] = {0: set(), 1: set()}
    share = contents._share
    monkeypatch.setattr(contents, "SEGMENT", 300)

    def recording(pieces: Any, rank: int, world_size: int) -> list[contents.Piece]:
        mine = share(pieces, rank, world_size)
        digested[rank] |= {f"{piece.file}@{piece.offset}" for piece in mine}
        return mine

    monkeypatch.setattr(contents, "_share", recording)
    assert job.save(1) == [None, None]
    path = job.folder / "step-1"
    data = (path / MANIFEST).read_bytes()
    reference = read(path)[1].manifest
    assert reference is not None
    assert reference.matches(data)
    files = Manifest.decode(data).files
    assert {name: entry.size for name, entry in files.items()} == {
        "shards/rank-0": 1000,
        "shards/rank-1": 1000,
    }
    assert all(len(one) == 4 for one in digested.values()), "each rank reads as much"
    assert not digested[0] & digested[1]
    assert {entry.name for entry in path.iterdir()} == {"shards", MARKER, MANIFEST}


def test_all_is_on_the_disk_before_a_checkpoint_has_its_name(job: Job, monkeypatch: pytest.MonkeyPatch):
    synced = Synced.record(monkeypatch)
    job.save(1)
    synced.check_committed(job.folder / "step-1")
    synced.check_made(job.folder)
    synced.check_made(job.folder.parent)


def test_the_ranks_of_a_host_sync_what_was_written_there_together(monkeypatch: pytest.MonkeyPatch):
    assert contents._local_rank(8) == (0, 1), "it is not known which ranks are here: each syncs all"
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert contents._local_rank(8) == (3, 4)
    assert contents._local_rank(2) == (0, 1), "they do not all save"


def test_a_rank_that_cannot_digest_its_share_fails_the_save_of_all(job: Job, monkeypatch: pytest.MonkeyPatch):
    record = contents.record_share

    def failing(folder: Path, rank: int, world_size: int) -> None:
        if rank == 1:
            raise OSError(5, "Input/output error")
        record(folder, rank, world_size)

    monkeypatch.setattr(folders, "record_share", failing)
    failures = job.save(1)
    assert isinstance(failures[1], OSError)
    assert "rank 1 failed: OSError: [Errno 5] Input/output error" in str(failures[0])
    assert not (job.folder / "step-1").exists()


def test_a_rank_that_dies_while_it_digests_is_named(job: Job, monkeypatch: pytest.MonkeyPatch):
    record = contents.record_share

    def dying(folder: Path, rank: int, world_size: int) -> None:
        if rank == 1:
            job.table.lose(1)
            raise SystemExit
        record(folder, rank, world_size)

    monkeypatch.setattr(folders, "record_share", dying)
    failures = job.save(1)
    assert "lost rank 1" in str(failures[0]) or "rank 1 failed" in str(failures[0])
    assert not (job.folder / "step-1").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: flip(path / "shards" / "rank-0"),
        lambda path: flip(path / "shards" / "rank-1"),
        lambda path: (path / "shards" / "rank-1").write_bytes(b"2"),
        lambda path: (path / "shards" / "rank-1").unlink(),
        lambda path: (path / "shards" / "rank-1").write_bytes(bytes([2]) * 1001),
        lambda path: (path / MANIFEST).unlink(),
        lambda path: flip(path / MANIFEST),
        lambda path: flip(path / MARKER),
    ],
)
def test_damage_that_one_rank_finds_makes_all_step_down(job: Job, damage: Callable[[Path], None]):
    for number in (1, 2):
        job.save(number)
    assert job.choose() == [job.folder / "step-2"] * RANKS
    damage(job.folder / "step-2")
    assert job.choose() == [job.folder / "step-1"] * RANKS
    assert newest(job.folder, "step-") == job.folder / "step-1", "later lives pass it over"
    assert job.save(2) == [None, None], "the step is saved again"
    assert job.choose() == [job.folder / "step-2"] * RANKS


def test_damage_that_cannot_be_recorded_is_stepped_down_from_nevertheless(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    def cannot(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    for number in (1, 2):
        job.save(number)
    monkeypatch.setattr(folders, "mark_damaged", cannot)
    flip(job.folder / "step-2" / "shards" / "rank-1")
    assert job.choose() == [job.folder / "step-1"] * RANKS
    flip(job.folder / "step-1" / "shards" / "rank-0")
    assert {type(one) for one in job.choose()} == {CorruptCheckpointError}


def test_the_same_error_on_all_ranks_where_none_is_whole_or_one_was_named(job: Job):
    for number in (1, 2):
        job.save(number)
    flip(job.folder / "step-1" / "shards" / "rank-1")
    for _ in range(2):
        failures = job.choose_named(1)
        assert {type(one) for one in failures} == {CorruptCheckpointError}
        assert len(set(map(str, failures))) == 1
        assert "step-1 is damaged: shards/rank-1 at offset 0" in str(failures[0])
    assert Damage.decode((job.folder / "step-1" / DAMAGED).read_bytes()).rank == 1
    flip(job.folder / "step-2" / "shards" / "rank-0")
    failures = job.choose()
    assert {type(one) for one in failures} == {CorruptCheckpointError}
    assert "all committed checkpoints are damaged" in str(failures[1])


def test_what_was_replaced_while_it_was_verified_is_not_marked(job: Job, monkeypatch: pytest.MonkeyPatch):
    job.save(1)
    verify = contents.verify_share

    def replaced(folder: Path, reference: Any, rank: int, world_size: int) -> Damage | None:
        if rank == 1:
            staged = StagedCheckpoint(folder, 9, 9, "job", "folders")
            staged.begin()
            staged.commit(Marker("job", 0, 2, "checkpoint/folders", 9))
            return verify(folder, reference, rank, world_size)
        return None

    monkeypatch.setattr(folders, "verify_share", replaced)
    failures = job.choose()
    assert "was replaced while it was loaded" in str(failures[1])
    assert all(isinstance(one, BaseException) for one in failures)
    assert not (job.folder / "step-1" / DAMAGED).exists()


def test_a_checkpoint_without_digests_is_loaded_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = checkpoint_in(tmp_path)
    assert Job(tmp_path).choose() == [path] * RANKS
    assert caplog.text.count("step-1 has no digests: it is loaded unverified") == 1


def test_a_damaged_checkpoint_does_not_count_and_goes_when_it_is_outdated(tmp_path: Path):
    made: list[Path] = []
    for number in range(4):
        staged = StagedCheckpoint(tmp_path / f"step-{number}", 0, number, "job", "folders")
        staged.begin()
        staged.commit(Marker("job", 0, 2, "checkpoint/folders", 0))
        os.utime(staged.path / MARKER, (-number, -number))
        made.append(staged.path)
    mark_damaged(made[1], read(made[1])[1], Damage("weights", "flipped"))
    rotate(tmp_path, "step-", 3, set())
    assert [path.exists() for path in made] == [True] * 4, "three whole ones"
    rotate(tmp_path, "step-", 2, set())
    assert [path.exists() for path in made] == [False, False, True, True]


def test_checkpoint_that_is_marked_as_kept_is_not_removed(tmp_path: Path):
    made: list[Path] = []
    for number in range(5):
        staged = StagedCheckpoint(tmp_path / f"step-{number}", 0, number, "job", "folders")
        staged.begin()
        staged.commit(Marker("job", 0, 2, "checkpoint/folders", 0))
        made.append(staged.path)
    mark_damaged(made[1], read(made[1])[1], Damage("weights", "flipped"))
    for path in (made[0], made[1]):
        (path / KEPT).touch()
    rotate(tmp_path, "step-", 1, set())
    assert [path.exists() for path in made] == [True, True, False, False, True]


def test_rotation_that_fails_does_not_stop_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    checkpoint_in(tmp_path)
    monkeypatch.setattr(folders, "entries", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    rotate(tmp_path, "step-", 1, set())
    assert "are not removed" in caplog.text


def test_a_file_of_the_framework_that_has_a_name_of_ours_is_not_lost(
    job: Job, monkeypatch: pytest.MonkeyPatch
):
    def write(rank: int, _: int, unfinished: Path) -> None:
        unfinished.mkdir(parents=True, exist_ok=True)
        (unfinished / MANIFEST).write_text("theirs")

    monkeypatch.setattr(job, "write", write)
    assert "and Muster needs that name for its own" in str(job.save(1)[0])
    assert not (job.folder / "step-1").exists()


def test_each_rank_syncs_before_it_votes(job: Job, monkeypatch: pytest.MonkeyPatch):
    synced: dict[int, set[int]] = {}
    """By thread, the files."""
    fsync = os.fsync

    def recording(handle: Any) -> None:
        fsync(handle)
        number = handle if isinstance(handle, int) else handle.fileno()
        synced.setdefault(threading.get_ident(), set()).add(os.fstat(number).st_ino)

    def save(saves: FolderSaves, seat: Any) -> int:
        saves.save(seat, job.folder / "step-1", partial(job.write, seat.rank, 1))
        return threading.get_ident()

    monkeypatch.setattr(os, "fsync", recording)
    threads = job.each(save)
    for rank, thread in enumerate(threads):
        assert isinstance(thread, int)
        assert (job.folder / "step-1" / "shards" / f"rank-{rank}").stat().st_ino in synced[thread]


def test_note_of_a_rank_runs_no_code(tmp_path: Path):
    (tmp_path / "weights").write_bytes(b"weights")
    contents.record_share(tmp_path, 0, 2)
    leave_note(tmp_path, 1, pickle.dumps(Mine(tmp_path / "ran")))
    with pytest.raises(ValueError, match="note cannot be read"):
        contents.gather_manifest(tmp_path, 2)
    assert not (tmp_path / "ran").exists()


def test_what_a_rank_has_seen_outdated_is_digested_by_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As a client of NFS that looks at the attributes that it has kept."""
    monkeypatch.setattr(contents, "SEGMENT", 300)
    (tmp_path / "weights").write_bytes(b"weights" * 150)
    (tmp_path / "empty").touch()
    sizes = contents._sizes
    monkeypatch.setattr(contents, "_sizes", lambda _: {"weights": 700})
    contents.record_share(tmp_path, 1, 2)
    monkeypatch.setattr(contents, "_sizes", sizes)
    contents.record_share(tmp_path, 0, 2)
    manifest = contents.gather_manifest(tmp_path, 2)
    assert {name: entry.size for name, entry in manifest.files.items()} == {"empty": 0, "weights": 1050}
    reference = ManifestReference.of(manifest.encode())
    (tmp_path / MANIFEST).write_bytes(manifest.encode())
    assert [contents.verify_share(tmp_path, reference, rank, 3) for rank in range(3)] == [None] * 3


def test_manifest_is_complete_where_rank_0_sees_outdated_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else a whole checkpoint would be marked as damaged when it is loaded, or a file never be verified."""
    (tmp_path / "weights").write_bytes(b"weights" * 150)
    (tmp_path / "late").write_bytes(b"late")
    contents.record_share(tmp_path, 1, 2)
    with monkeypatch.context() as outdated:
        outdated.setattr(contents, "_sizes", lambda _: {"weights": 700})
        contents.record_share(tmp_path, 0, 2)
        leave_note(tmp_path, 1, encoded({contents.Piece("late", 0, 4): digest_of(b"late")}))
        manifest = contents.gather_manifest(tmp_path, 2)
    assert {name: entry.size for name, entry in manifest.files.items()} == {"late": 4, "weights": 1050}
    reference = ManifestReference.of(manifest.encode())
    (tmp_path / MANIFEST).write_bytes(manifest.encode())
    assert [contents.verify_share(tmp_path, reference, rank, 2) for rank in range(2)] == [None] * 2


def test_a_damaged_checkpoint_that_has_lost_its_marker_goes_as_well(job: Job):
    for number in (1, 2):
        job.save(number)
    (job.folder / "step-1" / MARKER).unlink()
    rotate(job.folder, "step-", 2, set())
    assert (job.folder / "step-1").exists()
    rotate(job.folder, "step-", 1, set())
    assert not (job.folder / "step-1").exists()


def test_a_save_that_has_written_nothing_is_no_checkpoint(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job, "write", lambda *_: None)
    assert "the ranks have written nothing" in str(job.save(1)[0])
    assert not (job.folder / "step-1").exists()


def test_what_took_the_name_of_a_damaged_checkpoint_is_not_marked(job: Job, monkeypatch: pytest.MonkeyPatch):
    job.save(1)
    flip(job.folder / "step-1" / "shards" / "rank-1")
    look, looked = folders._seen, threading.Event()

    def then_replaced(barrier: Any, folder: Path, name: str, *, verify: bool) -> bytes:
        said = look(barrier, folder, name, verify=verify)
        if barrier.rank == 0:
            looked.wait(PATIENCE)
            checkpoint_in(job.folder)
        looked.set()
        return said

    monkeypatch.setattr(folders, "_seen", then_replaced)
    assert {type(one) for one in job.choose()} == {CorruptCheckpointError}
    assert not (job.folder / "step-1" / DAMAGED).exists()
