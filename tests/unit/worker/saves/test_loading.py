"""Loads that all ranks agree on: the same bytes on all of them, or the same error."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.damage import Damage, DamageError
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import BarrierAbortedError, MemberLostError, MusterError, OutcomeUnknownError
from muster.worker.saves import Checkpointer, Committed, CorruptCheckpointError
from muster.worker.saves.loading import AgreedLoad, Chosen
from muster.worker.saves.storage.bucket_storage import BucketStorage
from muster.worker.saves.storage.folder_storage import FolderStorage
from muster.worker.saves.storage.reading import VerifyingReader
from tests.support.expect import raising
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.damage import flip
from tests.support.saves.fake_group import FakeGroup, Member

RANKS = 3


def state(value: float) -> dict[str, Any]:
    return {"weight": torch.full((500,), float(value)), "step": value}


class Job:
    """Three ranks in this process, which have saved steps 1 to 3."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.group = FakeGroup(RANKS)
        members = [self.group.member(rank) for rank in range(RANKS)]
        self.ranks = [Checkpointer(folder, barrier=member, timeout=30) for member in members]  # type: ignore[arg-type]
        for step in (1, 2, 3):
            self.all(lambda one, _, step=step: one.save(step, state(step)))  # type: ignore[misc]
        assert self.all(lambda one, _: one.finalize(blocking=True)) == [[1, 2, 3]] * RANKS

    def all(self, call: Callable[[Checkpointer, int], Any]) -> list[Any]:
        """What a call returns on each rank, or raises there."""
        calls: list[Future[Any]] = [
            in_thread(partial(call, one, rank)) for rank, one in enumerate(self.ranks)
        ]
        return [one.exception() or one.result() for one in calls]

    def hurt(self, step: int, name: str = "__0_0.distcp") -> None:
        flip(self.folder / f"step-{step:010}" / name)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(Checkpointer, "_check_group", lambda _: None)
    with no_child_left():
        made = Job(tmp_path)
        yield made
        for rank in made.ranks:
            rank.close()


def resumed(one: Checkpointer, _: int) -> tuple[int, float]:
    into = state(-1)
    found = one.resume(into)
    assert found is not None
    assert torch.equal(into["weight"], torch.full((500,), float(into["step"])))
    return found.step, into["step"]


def test_all_ranks_resume_from_the_newest(job: Job):
    assert job.all(resumed) == [(3, 3)] * RANKS


def test_all_ranks_step_down_if_one_finds_damage(job: Job, monkeypatch: pytest.MonkeyPatch):
    """One rank alone reads wrong bytes, time and again: its disk or memory is bad."""
    read = VerifyingReader._read

    def wrong(self: VerifyingReader, item: Any, buffer: memoryview) -> None:
        if self._of.made.step == 3 and self is bad[0]:
            raise DamageError(Damage("__0_0.distcp", "wrong bytes", item.offset))
        read(self, item, buffer)

    bad: list[VerifyingReader] = []
    init = VerifyingReader.__init__

    def first(self: VerifyingReader, opened: Any) -> None:
        init(self, opened)
        if not bad:
            bad.append(self)

    monkeypatch.setattr(VerifyingReader, "__init__", first)
    monkeypatch.setattr(VerifyingReader, "_read", wrong)
    assert job.all(resumed) == [(2, 2)] * RANKS
    assert (job.folder / "step-0000000003" / ".damaged.json").exists()
    assert job.all(resumed) == [(2, 2)] * RANKS


def test_ranks_step_down_as_far_as_needed_and_raise_alike_at_the_end(job: Job):
    job.hurt(3)
    job.hurt(2, ".metadata")
    assert job.all(resumed) == [(1, 1)] * RANKS
    job.hurt(1, "manifest.json")
    heard = job.all(resumed)
    assert [type(one) for one in heard] == [CorruptCheckpointError] * RANKS
    assert "step-0000000002: .metadata" in str(heard[2])


def test_failure_of_one_rank_is_the_failure_of_all(job: Job):
    def load(one: Checkpointer, rank: int) -> object:
        into = state(0)
        if rank == 1:
            into["more"] = torch.zeros(2)
        return one.resume(into)

    heard = job.all(load)
    assert [type(one) for one in heard] == [BarrierAbortedError, RuntimeError, BarrierAbortedError]
    assert "rank 1 failed: RuntimeError" in str(heard[0])
    assert "more" in str(heard[2])
    assert job.all(resumed) == [(3, 3)] * RANKS, "the ranks are in step"


def test_interrupt_of_one_rank_keeps_nobody_waiting(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job.ranks[2]._storage, "read", raising(KeyboardInterrupt))
    heard = job.all(resumed)
    assert [type(one) for one in heard] == [BarrierAbortedError, BarrierAbortedError, KeyboardInterrupt]
    monkeypatch.undo()
    assert job.all(resumed) == [(3, 3)] * RANKS


def test_io_error_on_rank_0_is_an_error_on_all(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(job.ranks[0]._storage, "newest", raising(OSError, 5, "Input/output error"))
    heard = job.all(resumed)
    assert isinstance(heard[0], OSError)
    assert all("Input/output error" in str(one) for one in heard)
    monkeypatch.undo()
    assert job.all(resumed) == [(3, 3)] * RANKS


def test_lost_rank_is_named_to_ranks_with_a_failed_collective(job: Job, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "muster.worker.saves.storage.reading.load",
        raising(RuntimeError, "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.3]"),
    )

    def load(one: Checkpointer, rank: int) -> object:
        if rank != 1:
            return one.resume(state(0))
        one._load._choose(one._load._look, one._storage.resolve_name)
        newest = one.latest()
        assert newest is not None
        one._load._open(newest)
        job.group.lose(1)
        return "dead"

    heard = job.all(load)
    assert heard[1] == "dead"
    assert [type(heard[rank]) for rank in (0, 2)] == [MemberLostError] * 2
    assert "rank 1" in str(heard[0])


def test_collective_that_failed_without_a_death_is_an_error_on_all(job: Job, monkeypatch: pytest.MonkeyPatch):
    def load(one: Checkpointer, rank: int) -> object:
        def fine(_: object) -> None:
            return None

        return one._load.newest(raising(RuntimeError, "gloo: timed out") if rank == 1 else fine)

    heard = job.all(load)
    assert all(isinstance(one, RuntimeError) for one in heard)
    assert isinstance(heard[0], MusterError)
    assert "a collective of torch's failed" in str(heard[0])
    assert "gloo: timed out" in str(heard[1])


def test_ranks_that_name_different_checkpoints_are_told(job: Job):
    heard = job.all(lambda one, rank: one.load(state(0), job.folder / f"step-{1 + (rank == 2):010}"))
    assert [type(one) for one in heard] == [ValueError] * RANKS
    assert "and rank 2" in str(heard[0])
    heard = job.all(lambda one, rank: one.load(state(0), job.folder / "step-0000000001" if rank else None))
    assert [type(one) for one in heard] == [ValueError] * RANKS


def test_rank_that_sees_another_checkpoint_fails_the_load(job: Job, monkeypatch: pytest.MonkeyPatch):
    read = job.ranks[1]._storage.read

    def older(path: Path) -> Committed:
        return read(job.folder / "step-0000000001")

    monkeypatch.setattr(job.ranks[1]._storage, "read", older)
    heard = job.all(resumed)
    assert isinstance(heard[1], OSError)
    assert "is not the same checkpoint to all ranks" in str(heard[0])


def test_checkpoint_that_cannot_be_marked_is_passed_over(job: Job, monkeypatch: pytest.MonkeyPatch):
    job.hurt(3)
    monkeypatch.setattr(job.ranks[0]._storage, "mark_damaged", raising(PermissionError, "read-only"))
    assert job.all(resumed) == [(2, 2)] * RANKS
    assert job.all(resumed) == [(2, 2)] * RANKS
    assert not (job.folder / "step-0000000003" / ".damaged.json").exists()


def test_load_keeps_its_checkpoint_from_retention(job: Job):
    first = job.folder / "step-0000000001"
    seen: list[bool] = []

    def load(one: Checkpointer, rank: int) -> object:
        def look(_: object) -> None:
            if rank == 0:
                one._storage.sweep(1, SaveAttempt(0, 9), one._load.used)
                seen.append(first.exists())

        return one._load.named(first, look).step

    assert job.all(load) == [1] * RANKS
    assert seen == [True]


def test_rank_0_alone_cannot_say_that_there_is_none(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The share is not mounted on its host: the folder is there, and empty."""
    monkeypatch.setattr(job.ranks[0]._load, "_storage", FolderStorage(tmp_path / "local disk"))
    heard = job.all(lambda one, _: one.resume(state(-1)))
    assert all(isinstance(one, OSError | BarrierAbortedError) for one in heard)
    assert "rank 0 finds no checkpoint, and rank" in str(heard[0])
    monkeypatch.undo()
    assert job.all(resumed) == [(3, 3)] * RANKS


def test_all_ranks_begin_from_scratch_where_there_is_none(job: Job, tmp_path: Path):
    for one in job.ranks:
        one._load._storage = FolderStorage(tmp_path / "another")
    assert job.all(lambda one, _: one.resume(state(-1))) == [None] * RANKS


def test_damage_that_cannot_be_marked_does_not_count_for_retention(job: Job, monkeypatch: pytest.MonkeyPatch):
    job.hurt(3)
    monkeypatch.setattr(job.ranks[0]._storage, "mark_damaged", raising(OSError, 122, "Disk quota exceeded"))
    assert job.all(resumed) == [(2, 2)] * RANKS
    rank_0 = job.ranks[0]
    rank_0._storage.sweep(1, SaveAttempt(0, 9), rank_0._load.used, rank_0._load.excluded)
    assert job.all(resumed) == [(2, 2)] * RANKS


def test_link_that_is_moved_during_a_load_has_no_effect(job: Job, monkeypatch: pytest.MonkeyPatch):
    link = job.folder / "best"
    link.symlink_to("step-0000000001")
    load = AgreedLoad._load

    def move_and_load(self: AgreedLoad, *args: Any) -> Damage | None:
        if self is job.ranks[0]._load:
            link.unlink()
            link.symlink_to("step-0000000002")
        return load(self, *args)

    monkeypatch.setattr(AgreedLoad, "_load", move_and_load)
    assert job.all(lambda one, _: one.load(state(-1), link).step) == [1] * RANKS
    assert not list(job.folder.glob("*/.damaged.json"))


def test_mark_of_any_size_keeps_nobody_from_resuming(job: Job, monkeypatch: pytest.MonkeyPatch):
    """The coordinator refuses a payload above 1 MiB."""
    mark = Damage("a", "b" * 2**21).encode()
    (job.folder / "step-0000000003" / ".damaged.json").write_bytes(mark)
    sizes = []
    arrive = job.group.arrive

    def watch(member: Member, sequence: int, failure: str | None, payload: bytes) -> Decision:
        sizes.append(len(payload))
        return arrive(member, sequence, failure, payload)

    monkeypatch.setattr(job.group, "arrive", watch)
    assert job.all(resumed) == [(2, 2)] * RANKS
    assert max(sizes) < 2**16


def test_checkpoint_outside_of_the_folder_is_not_loaded(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A process that can speak as rank 0 chooses among the checkpoints of the job, and no other file."""
    elsewhere = tmp_path.with_name(f"{tmp_path.name}-elsewhere") / "step-0000000003"
    shutil.copytree(job.folder / elsewhere.name, elsewhere)
    shutil.rmtree(job.folder / elsewhere.name)
    encode = Chosen.encode

    def tell_a_path(self: Chosen) -> str:
        fields = json.loads(encode(self))
        return json.dumps({**fields, "name": str(elsewhere), "path": str(elsewhere)})

    read: list[Path | str] = []
    monkeypatch.setattr(Chosen, "encode", tell_a_path)
    monkeypatch.setattr(job.ranks[1]._storage, "read", read.append)
    heard = job.all(resumed)
    assert ["that is no name in a folder" in str(one) for one in heard] == [True] * RANKS
    assert read == []


def test_name_of_a_bucket_leads_nowhere_else(tmp_path: Path):
    storage = BucketStorage(f"file://{tmp_path}", {}, "job")
    assert storage.resolve_name("step-1") == f"file://{tmp_path}/step-1"
    assert storage.resolve_name("step-1", beside="s3://theirs/step-2/") == "s3://theirs/step-1"
    for name in ("file:///elsewhere/step-1", "../step-1", "..", ""):
        with pytest.raises(ValueError, match="that is no name in a folder"):
            storage.resolve_name(name)


AWAY = OutcomeUnknownError("the coordinator is away", "save/load", 0, Outcome.UNKNOWN)


def test_load_can_be_called_again_if_the_outcome_of_its_start_is_unknown(job: Job):
    member: Any = job.ranks[1]._load._barrier
    member.raises = {member.sequence: [AWAY]}

    def load(one: Checkpointer, rank: int) -> tuple[int, float]:
        if rank == 1:
            with pytest.raises(OutcomeUnknownError):
                resumed(one, rank)
        return resumed(one, rank)

    assert job.all(load) == [(3, 3)] * RANKS


@pytest.mark.parametrize("barrier", [1, 2], ids=["opened", "loaded"])
def test_load_after_an_unknown_outcome_asks_for_a_restart(job: Job, barrier: int):
    """Else this rank takes what the others say of the last load for what they say of this one."""
    member: Any = job.ranks[1]._load._barrier
    member.raises = {member.sequence + barrier: [AWAY]}

    def load(one: Checkpointer, rank: int) -> object:
        if rank != 1:
            return one.resume(state(-1))
        with pytest.raises(OutcomeUnknownError):
            one.resume(state(-1))
        try:
            return one.resume(state(-1))
        finally:
            job.group.lose(1)

    heard = job.all(load)
    assert [type(one) for one in heard] == [MemberLostError, MusterError, MemberLostError]
    assert "restart the job on all ranks" in str(heard[1])
