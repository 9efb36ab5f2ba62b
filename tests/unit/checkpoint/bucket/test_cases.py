"""The protocol, case by case, in fsspec's own memory."""

import json
import logging
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

import pytest

from muster.checkpoint.bucket.attempts import Attempt
from muster.checkpoint.bucket.fsspec_objects import FsspecObjects
from muster.checkpoint.bucket.protocol import LOOKS, CheckpointBucket
from muster.checkpoint.committed import Committed, SaveAttempt, UncommittedError
from muster.checkpoint.damage import DAMAGED
from muster.checkpoint.version import LaterVersionError

FIRST = SaveAttempt(0, 0)


@pytest.fixture
def objects() -> FsspecObjects:
    return FsspecObjects(f"memory://{uuid4().hex}", {})


@pytest.fixture
def bucket(objects: FsspecObjects) -> CheckpointBucket:
    return CheckpointBucket(objects, objects.url, "job")


def written(
    objects: FsspecObjects, bucket: CheckpointBucket, step: int, save: SaveAttempt = FIRST
) -> Attempt:
    attempt = bucket.attempt(step, save)
    objects.put(f"{attempt.name}/data", str(step).encode())
    return attempt


def commit(
    objects: FsspecObjects, bucket: CheckpointBucket, step: int, save: SaveAttempt = FIRST
) -> Committed:
    attempt = written(objects, bucket, step, save)
    made = Committed(step, 2, "job", "save", step, bucket.path(attempt))
    return bucket.commit(attempt, made, {"data": len(str(step))})


def test_latest_finds_the_checkpoint_committed_last(objects: FsspecObjects, bucket: CheckpointBucket):
    assert bucket.latest() is None
    made = [commit(objects, bucket, step) for step in (5, 9_999_999_999, 10_000_000_000, 10)]
    written(objects, bucket, 10_000_000_001)
    assert bucket.latest() == made[3]
    assert bucket.read(str(made[0].path).rpartition("/")[2]) == made[0]
    assert bucket.committed(5) is not None
    assert bucket.committed(6) is None


def test_latest_takes_the_later_commit_of_a_step(objects: FsspecObjects, bucket: CheckpointBucket):
    saves = [SaveAttempt(1, 10), SaveAttempt(2, 0), SaveAttempt(1, 9)]
    made = [commit(objects, bucket, 3, save) for save in saves]
    assert bucket.latest() == made[2]


def test_a_step_is_not_committed_twice_by_one_attempt(objects: FsspecObjects, bucket: CheckpointBucket):
    made = commit(objects, bucket, 3)
    assert commit(objects, bucket, 3) == made, "an answer was lost, and the same is said again"
    other = CheckpointBucket(objects, objects.url, "job")
    with pytest.raises(UncommittedError, match="was given up by a restart"):
        other.commit(bucket.attempt(3, SaveAttempt(0, 0)), Committed(3, 9, "job", "save", 3, ""), {"data": 1})
    assert bucket.latest() == made


@pytest.mark.parametrize(
    "garbage", [b"", b"{", b"[]", b"7", b'{"format": 1}', {"step": 8}, {"files": 3}, {"x": 1}]
)
def test_a_verdict_that_is_garbage_is_none_and_is_left(
    objects: FsspecObjects, bucket: CheckpointBucket, garbage: Any, caplog: pytest.LogCaptureFixture
):
    first = commit(objects, bucket, 1)
    second = commit(objects, bucket, 2)
    name = str(second.path).rpartition("/")[2]
    verdict = objects.get(f"{name}.json")
    if isinstance(garbage, dict):
        garbage = json.dumps(json.loads(verdict) | garbage).encode()
    objects.put(f"{name}.json", garbage)
    fresh = CheckpointBucket(objects, objects.url, "job")
    with caplog.at_level(logging.WARNING):
        assert fresh.latest() == first
    assert f"{second.path} is passed over" in caplog.text
    with pytest.raises(UncommittedError, match=f"the last committed one here is {first.path}"):
        fresh.read(name)
    fresh.sweep(1)
    assert objects.get(f"{name}.json") == garbage
    assert fresh.latest() == first, "what cannot be read is no newer checkpoint, for which this one could go"


@pytest.mark.parametrize("look", ["latest", "entries", "sweep"])
def test_restored_verdict_does_not_come_after_a_later_commit(
    objects: FsspecObjects, bucket: CheckpointBucket, look: str
):
    made = [commit(objects, bucket, step) for step in (90, 100)]
    verdict = f"{str(made[1].path).rpartition('/')[2]}.json"
    data = objects.get(verdict)
    objects.put(verdict, data[:-1])
    fresh = CheckpointBucket(objects, objects.url, "job")
    looks: dict[str, Callable[[], object]] = {
        "latest": fresh.latest,
        "entries": fresh.entries,
        "sweep": lambda: fresh.sweep(None),
    }
    looks[look]()
    later = commit(objects, fresh, 60)
    objects.put(verdict, data)
    orders = [entry.made.order for entry in fresh.entries() if entry.made is not None]
    assert orders == [1, 2, 3]
    assert fresh.latest() == later
    fresh.sweep(1)
    assert fresh.latest() == later
    assert commit(objects, fresh, 61).order == 4


def test_a_verdict_of_another_version_is_an_error(objects: FsspecObjects, bucket: CheckpointBucket):
    commit(objects, bucket, 1)
    name = str(commit(objects, bucket, 2).path).rpartition("/")[2]
    objects.put(f"{name}.json", b'{"format": 2, "something": "else"}')
    fresh = CheckpointBucket(objects, objects.url, "job")
    for look in (fresh.latest, lambda: fresh.read(name)):
        with pytest.raises(LaterVersionError, match=f"{name}.json was written by another version of Muster"):
            look()
    fresh.sweep(1)
    assert objects.sizes(name) == {"data": 1}


@pytest.mark.parametrize("name", ["step-1", "nothing", "step-0000000001.0-0-00000000"])
def test_read_of_a_name_without_a_committed_checkpoint_is_refused(
    objects: FsspecObjects, bucket: CheckpointBucket, name: str
):
    commit(objects, bucket, 1)
    with pytest.raises(UncommittedError, match=f"{name} is not a committed checkpoint"):
        bucket.read(name)


def test_abandoned_attempt_is_neither_committed_nor_read(objects: FsspecObjects, bucket: CheckpointBucket):
    attempt = written(objects, bucket, 1)
    sweeper = CheckpointBucket(objects, objects.url, "another job")
    # Another job that begins takes nobody else to be at work.
    objects.create(attempt.verdict, b'{"format": 1, "verdict": "abandoned"}')
    with pytest.raises(UncommittedError, match="another job in the same place"):
        bucket.commit(attempt, Committed(1, 1, "job", "save", 1, ""), {"data": 1})
    with pytest.raises(UncommittedError, match="it was abandoned"):
        bucket.read(attempt.name)
    sweeper.sweep(None)
    assert objects.names() == set()


def test_commit_of_a_swept_attempt_reports_the_missing_files(
    objects: FsspecObjects, bucket: CheckpointBucket, caplog: pytest.LogCaptureFixture
):
    attempt = written(objects, bucket, 1)
    CheckpointBucket(objects, objects.url, "job").sweep(None)
    assert objects.names() == set()
    assert f"{bucket.path(attempt)} was not committed: its save was interrupted" in caplog.text
    with pytest.raises(UncommittedError, match="1 are not there as they were written, such as data"):
        bucket.commit(attempt, Committed(1, 1, "job", "save", 1, ""), {"data": 1})
    assert objects.names() == set()


def test_a_sweep_leaves_what_is_still_written_and_what_is_not_ours(
    objects: FsspecObjects, bucket: CheckpointBucket
):
    made = [commit(objects, bucket, step, SaveAttempt(1, step)) for step in (1, 2, 3)]
    failed = written(objects, bucket, 4, SaveAttempt(1, 4))
    begun = written(objects, bucket, 5, SaveAttempt(1, 5))
    theirs = Attempt(4, SaveAttempt(0, 0), "0" * 8)
    for name in ("notes.txt", "logs/today", "step-3/data", f"{theirs.name}/data"):
        objects.put(name, b"")
    bucket.sweep(2, SaveAttempt(1, 4))
    assert objects.sizes(failed.name) == {}
    assert objects.names() == {
        *(f"{one.path}/".rpartition(f"{bucket.url}/")[2] for one in made[1:]),
        *(str(one.path).rpartition("/")[2] + ".json" for one in made[1:]),
        f"{begun.name}/", f"{theirs.name}/", "notes.txt", "logs/", "step-3/",
    }  # fmt: skip
    bucket.sweep(2)
    assert {"notes.txt", "logs/", "step-3/"} < objects.names()
    assert objects.sizes(begun.name) == objects.sizes(theirs.name) == {}


def test_a_checkpoint_that_someone_has_damaged_is_passed_over_and_left(
    objects: FsspecObjects, bucket: CheckpointBucket, caplog: pytest.LogCaptureFixture
):
    first = commit(objects, bucket, 1)
    second = str(commit(objects, bucket, 2).path).rpartition("/")[2]
    objects.put(f"{second}/data", b"too long")
    fresh = CheckpointBucket(objects, objects.url, "job")
    assert fresh.latest() == first
    fresh.sweep(1)
    assert "is left as it is" in caplog.text
    assert objects.sizes(second) == {"data": 8}
    assert fresh.latest() == first


def test_one_listing_that_is_short_does_not_hide_the_newest_checkpoint(
    objects: FsspecObjects, bucket: CheckpointBucket, monkeypatch: pytest.MonkeyPatch
):
    commit(objects, bucket, 1)
    newest = commit(objects, bucket, 2)
    sizes = objects.sizes
    short = iter([True])
    monkeypatch.setattr(objects, "sizes", lambda name: {} if next(short, False) else sizes(name))
    fresh = CheckpointBucket(objects, objects.url, "job")
    assert fresh.latest() == newest
    assert fresh.latest() == newest


def test_latest_finds_the_newer_checkpoint_if_retention_removes_the_older_meanwhile(
    objects: FsspecObjects, bucket: CheckpointBucket, monkeypatch: pytest.MonkeyPatch
):
    commit(objects, bucket, 1)
    get_all = objects.get_all
    newer: list[Committed] = []

    def removed_meanwhile(names: Iterable[str]) -> dict[str, bytes]:
        if not newer:
            newer.append(commit(objects, bucket, 2))
            bucket.sweep(1, SaveAttempt(0, 0))
        return get_all(names)

    monkeypatch.setattr(objects, "get_all", removed_meanwhile)
    assert CheckpointBucket(objects, objects.url, "job").latest() == newer[0]


def test_latest_gives_up_if_listings_keep_showing_removed_checkpoints(
    objects: FsspecObjects, bucket: CheckpointBucket, monkeypatch: pytest.MonkeyPatch
):
    commit(objects, bucket, 1)
    names = objects.names()
    objects.remove(name for name in names if not name.endswith("/"))
    monkeypatch.setattr(objects, "names", lambda: names)
    with pytest.raises(OSError, match=f"lists checkpoints that are not there, at each of {LOOKS} looks"):
        CheckpointBucket(objects, objects.url, "job").latest()


def test_a_folder_of_checkpoints_is_refused(objects: FsspecObjects, bucket: CheckpointBucket):
    bucket.check_kind()
    objects.put("step-0000000005/committed.json", b"{}")
    with pytest.raises(UncommittedError, match=r"step-0000000005/, which was committed by rename"):
        bucket.check_kind()


def test_attempt_is_not_committed_between_two_concurrent_sweeps(
    objects: FsspecObjects, bucket: CheckpointBucket, monkeypatch: pytest.MonkeyPatch
):
    attempt = bucket.attempt(1, FIRST)
    objects.put(f"{attempt.name}/.entered-0", b"")
    objects.put(f"{attempt.name}/.ranks/proposed-0", b"")
    first, second = (CheckpointBucket(objects, objects.url, f"job {number}") for number in (1, 2))
    remove = objects.remove
    made = Committed(1, 1, "job", "save", 1, "")

    def stand_still(names: Any) -> None:
        names = list(names)
        if names == [attempt.verdict]:
            monkeypatch.setattr(objects, "remove", remove)
            second.sweep(None)
            objects.put(f"{attempt.name}/data", b"1")
            with pytest.raises(UncommittedError):
                bucket.commit(attempt, made, {"data": 1, ".entered-0": 0})
        remove(names)

    monkeypatch.setattr(objects, "remove", stand_still)
    first.sweep(None)
    assert bucket.latest() is None
    bucket.sweep(None)
    assert objects.names() == set()


def test_damage_that_cannot_be_marked_does_not_count(objects: FsspecObjects, bucket: CheckpointBucket):
    first = commit(objects, bucket, 1, SaveAttempt(0, 0))
    second = commit(objects, bucket, 2, SaveAttempt(0, 1))
    bucket.sweep(1, SaveAttempt(0, 1), (), [str(second.path)])
    assert bucket.latest([str(second.path)]) == first


def test_mark_of_another_process_does_not_count(objects: FsspecObjects, bucket: CheckpointBucket):
    """Somebody has marked what this process itself committed, and saw whole."""
    first = commit(objects, bucket, 1, SaveAttempt(0, 0))
    second = commit(objects, bucket, 2, SaveAttempt(0, 1))
    attempt = Attempt.parse(str(second.path).rpartition("/")[2])
    assert attempt is not None
    CheckpointBucket(objects, objects.url, "").mark(attempt, DAMAGED, b"{}")
    bucket.sweep(1, SaveAttempt(0, 1))
    assert bucket.latest() == first
