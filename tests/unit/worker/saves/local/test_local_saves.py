"""Saves to the nodes' own disks, and resuming from them, with fake keepers."""

import shutil
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from muster.checkpoint.committed import Committed, SaveAttempt
from muster.checkpoint.directory import CheckpointDirectory
from muster.checkpoint.manifest import ManifestReference
from muster.worker.errors import AsyncSaveError, BarrierAbortedError, MusterError
from muster.worker.saves import Checkpointer, CorruptCheckpointError
from muster.worker.saves.local import keeper_client, local_calls, recovery
from muster.worker.saves.local.level import Level
from muster.worker.saves.local_barrier import LocalBarrier
from muster.worker.saves.storage.folder_storage import FolderStorage
from muster.worker.saves.storage.open_storage import absolute
from tests.support.expect import raising
from tests.support.saves.damage import flip
from tests.support.saves.fake_barrier import FakeBarrier
from tests.unit.worker.saves.local.conftest import LocalJob, state


def part(job: LocalJob, node: int, attempt: str, rank: int) -> Path:
    return job.nodes[node].folder.path / attempt / f"__{rank}_0.distcp"


def test_job_resumes_from_its_nodes_without_shared_storage(job: LocalJob):
    job.begin()
    job.save(1, 2, 3)
    job.begin()
    assert job.resume() == [3] * 3
    assert not job.shared.exists()


def test_part_is_written_on_the_node_of_its_rank_alone(job: LocalJob):
    job.begin().save(7)
    for rank, node in enumerate(job.nodes):
        names = {path.name for path in (node.folder.path / "0-0").iterdir()}
        head = {"manifest.json", ".metadata"} if rank == 0 else set()
        assert names == {f"__{rank}_0.distcp", ".notes"} | head


def test_commit_says_what_the_checkpoint_is(job: LocalJob):
    job.begin(replicas=2, persist_every=2, keep_last=5)
    job.save(4, 5)
    job.save(6, wait_for="replicated")
    first, second, third = job.service.requests
    manifest = (job.nodes[0].folder.path / "0-0" / "manifest.json").read_bytes()
    sizes = sum(part(job, rank, "0-0", rank).stat().st_size for rank in range(3))
    one = first.checkpoint
    assert (one.attempt.generation, one.attempt.number, one.step, one.world_size) == (0, 0, 4, 3)
    assert (one.manifest_size, one.size, one.replicas) == (len(manifest), sizes, 2)
    assert (one.persist_to, one.keep_persisted) == (str(job.shared), 5)
    assert first.keeper_id == "keeper-0"
    assert (second.checkpoint.persist_to, second.checkpoint.keep_persisted) == ("", 0)
    assert third.checkpoint.persist_to == str(job.shared), "each second one goes there"
    assert [one.wait_for for one in job.service.requests] == [1, 1, 2]


def test_save_that_waits_for_shared_storage_goes_there(job: LocalJob):
    job.begin(persist_every=10).save(1, 2)
    job.save(3, wait_for="persisted")
    there = [request.checkpoint.persist_to for request in job.service.requests]
    assert there == [str(job.shared), "", str(job.shared)]


def test_level_is_what_the_keeper_was_told(job: LocalJob):
    job.begin().save(1)
    assert job.all(lambda one, _: one.level(1)) == [Level.LOCAL] * 3
    assert job.all(lambda one, _: one.level(2)) == [None] * 3


def test_lost_disk_is_filled_from_other_nodes(job: LocalJob):
    job.begin().save(1, 2)
    copy = job.nodes[1].folder.path / "0-1" / "__2_0.distcp"
    shutil.copyfile(part(job, 2, "0-1", 2), copy)
    job.nodes[2].wipe()
    job.begin()
    assert job.resume() == [2] * 3
    assert not job.shared.exists()


def test_older_step_is_resumed_from_if_a_part_of_the_newest_is_lost(job: LocalJob):
    job.begin().save(1, 2)
    part(job, 2, "0-1", 2).unlink()
    job.begin()
    assert job.resume() == [1] * 3


def test_step_is_saved_again_after_an_older_one_is_resumed_from(job: LocalJob):
    job.begin().save(1, 2)
    part(job, 2, "0-1", 2).unlink()
    job.begin()
    assert job.resume() == [1] * 3
    job.save(2)
    job.begin()
    assert job.resume() == [2] * 3


def test_job_without_local_copies_resumes_from_shared_storage(job: LocalJob, monkeypatch: pytest.MonkeyPatch):
    job.begin()
    assert job.resume() == [None] * 3
    job.save(5)
    _persist(job, SaveAttempt(0, 0), 5)
    for node in job.nodes:
        node.wipe()
    job.begin()
    assert job.resume() == [5] * 3
    job.save(6)
    assert job.resume() == [6] * 3, "the decision is not that of the resume before"


def _persist(job: LocalJob, attempt: SaveAttempt, step: int) -> None:
    """What keepers do."""
    storage = FolderStorage(job.shared, "job")
    pending = storage.pending(step, attempt)
    pending.begin()
    for node in job.nodes:
        for path in node.folder.attempt(attempt).iterdir():
            if path.is_file():
                shutil.copyfile(path, pending._unfinished / path.name)
    data = (pending._unfinished / "manifest.json").read_bytes()
    made = Committed(step, 3, "job", "save", attempt.number, pending.checkpoint)
    storage.commit(pending._unfinished, replace(made, manifest=ManifestReference.of(data)))


# ---------------------------------------------------------------------- damage while resuming


def test_damage_after_the_decision_leads_to_another_copy(job: LocalJob):
    """The keeper verified the part, and it is damaged before the rank reads it."""
    job.begin().save(1, 2)
    shutil.copyfile(part(job, 2, "0-1", 2), part(job, 0, "0-1", 2))
    job.begin()
    assert job.cluster.decide(1, 0) == (0, 1)
    flip(part(job, 2, "0-1", 2))
    assert job.resume() == [2] * 3


def test_part_that_is_lost_after_the_decision_leads_to_another_decision(job: LocalJob):
    job.begin().save(1, 2)
    job.begin()
    assert job.cluster.decide(1, 0) == (0, 1)
    part(job, 2, "0-1", 2).unlink()
    assert job.resume() == [1] * 3
    assert max(job.cluster.decisions) == (1, 2), "the ranks met twice: they opened it, and could not read it"


@pytest.mark.parametrize("name", ["manifest.json", ".metadata"])
def test_damaged_head_leads_to_another_decision(job: LocalJob, name: str):
    job.begin().save(1, 2)
    job.begin()
    assert job.cluster.decide(1, 0) == (0, 1)
    flip(job.nodes[0].folder.path / "0-1" / name)
    assert job.resume() == [1] * 3
    assert max(job.cluster.decisions) == (1, 1)


def test_partial_load_is_never_filled_from_two_checkpoints(job: LocalJob):
    job.begin().save(1, 2)
    job.begin()
    assert job.cluster.decide(1, 0) == (0, 1)
    part(job, 2, "0-1", 2).unlink()

    def resume(one: Checkpointer, rank: int) -> object:
        return one.resume(state(-1, rank), planner=DefaultLoadPlanner(allow_partial_load=True))

    heard = job.all(resume)
    assert [type(one) for one in heard] == [CorruptCheckpointError] * 3


def test_copies_that_can_never_be_read_lead_to_shared_storage(job: LocalJob, monkeypatch: pytest.MonkeyPatch):
    """A keeper shows a file that it takes for whole, and the rank reads wrong bytes time and again."""
    monkeypatch.setattr(recovery, "MAX_DECISIONS", 2)
    job.begin().save(1)
    _persist(job, SaveAttempt(0, 0), 1)
    job.begin()
    wrong = job.folder / "wrong"
    shutil.copyfile(part(job, 1, "0-0", 1), wrong)
    flip(wrong)
    fetch = type(job.nodes[1])._fetch

    def fetch_wrong(self: object, said: dict[str, object]) -> tuple[int, dict[str, object]]:
        if self is job.nodes[1] and said["name"] == "__1_0.distcp":
            return 200, {"path": str(wrong)}
        return fetch(self, said)  # type: ignore[arg-type]

    monkeypatch.setattr(type(job.nodes[1]), "_fetch", fetch_wrong)
    assert job.resume() == [1] * 3
    assert len([one for one in job.cluster.decisions if one[0] == 1]) == 2
    asked_last = [
        one for one in job.cluster.recoveries if one.number == max(o.number for o in job.cluster.recoveries)
    ]
    assert [one.without_local for one in asked_last] == [True] * 3, "the coordinator decides it, for all"
    asked = [said for path, said in job.nodes[1].asked if path == "/fetch" and said.get("verify")]
    assert asked, "the keeper is told"


def test_keeper_that_gets_no_answer_from_others_leads_to_another_decision(
    job: LocalJob, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(keeper_client, "FETCH_PATIENCE", 0.2)
    job.begin().save(1)
    job.begin()
    fetch = type(job.nodes[1])._fetch
    silent = [True]

    def answer_late(self: object, said: dict[str, object]) -> tuple[int, dict[str, object]]:
        if self is job.nodes[1] and silent and job.cluster.decisions.keys() <= {(1, 0)}:
            return 503, {"error": "no source answers"}
        return fetch(self, said)  # type: ignore[arg-type]

    monkeypatch.setattr(type(job.nodes[1]), "_fetch", answer_late)
    assert job.resume() == [1] * 3
    assert (1, 1) in job.cluster.decisions


def test_failed_load_of_one_rank_fails_all_ranks(job: LocalJob):
    job.begin().save(1)

    def load(one: Checkpointer, rank: int) -> object:
        into = state(0, rank)
        if rank == 1:
            into["more"] = torch.zeros(2)
        return one.resume(into)

    heard = job.all(load)
    assert [type(one) for one in heard] == [BarrierAbortedError, RuntimeError, BarrierAbortedError], heard
    assert job.resume() == [1] * 3, "the ranks are in step"


def test_rank_without_a_decision_fails_the_resume_for_all(job: LocalJob, monkeypatch: pytest.MonkeyPatch):
    job.begin().save(1)
    job.service.fails = [grpc.StatusCode.INVALID_ARGUMENT]
    heard = job.resume()
    assert sorted(type(one).__name__ for one in heard) == [
        "BarrierAbortedError",
        "BarrierAbortedError",
        "RefusedError",
    ]


# ---------------------------------------------------------------------- keepers and coordinators that fail


def test_keeper_that_ended_is_found_again(job: LocalJob):
    """Its next life has another port and token."""
    job.begin().save(1)
    for node in job.nodes:
        node.stop()
        node.start()
    job.save(2)
    assert [len(node.attached) for node in job.nodes] == [3, 3, 3], "at the start, and at each save"
    assert job.nodes[2].ranks == {2}
    assert job.resume() == [2] * 3


def test_coordinator_that_is_away_is_asked_again(job: LocalJob, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local_calls, "PAUSE", 0.01)
    job.begin()
    job.service.fails = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED]
    job.save(1)
    job.service.fails = [grpc.StatusCode.UNAVAILABLE] * 2
    assert job.resume() == [1] * 3


def test_commit_that_is_refused_fails_the_save_on_all_ranks(job: LocalJob):
    job.begin()
    job.service.fails = [grpc.StatusCode.FAILED_PRECONDITION]
    job.all(lambda one, rank: one.save(1, state(1, rank)))
    heard = job.finalize()
    assert [type(one) for one in heard] == [AsyncSaveError] * 3
    assert "as the test says" in str(heard[2])
    job.save(2)


def test_checkpoint_that_may_be_in_shared_storage_is_looked_for_there(job: LocalJob):
    """A keeper was permitted to commit it, and has."""
    job.begin(persist_every=10).save(1, 2)
    job.cluster.doubtful = [job.service.requests[1].checkpoint]
    job.cluster.doubtful[0].persist_to = str(job.shared)
    _persist(job, SaveAttempt(0, 1), 2)
    part(job, 2, "0-1", 2).unlink()
    job.begin()
    assert job.resume() == [2] * 3
    assert {tuple(one.absent) for one in job.cluster.recoveries} == {()}


def test_checkpoint_that_is_not_in_shared_storage_leads_to_another_decision(job: LocalJob):
    """A keeper was permitted to commit it, and cannot any more."""
    job.begin(persist_every=10).save(1, 2)
    job.cluster.doubtful = [job.service.requests[1].checkpoint]
    job.cluster.doubtful[0].persist_to = str(job.shared)
    unfinished = CheckpointDirectory(job.shared, "job").unfinished(2, SaveAttempt(0, 1))
    unfinished.mkdir()
    part(job, 2, "0-1", 2).unlink()
    job.begin()
    assert job.resume() == [1] * 3
    assert not unfinished.exists()
    said = [[(one.generation, one.number) for one in asked.absent] for asked in job.cluster.recoveries]
    assert sorted(said) == [[]] * 3 + [[(0, 1)]] * 3


def test_shared_storage_that_cannot_be_looked_at_is_not_taken_for_empty(
    job: LocalJob, monkeypatch: pytest.MonkeyPatch
):
    job.begin(persist_every=10).save(1, 2)
    job.cluster.doubtful = [job.service.requests[1].checkpoint]
    job.cluster.doubtful[0].persist_to = str(job.shared)
    monkeypatch.setattr(FolderStorage, "settle", raising(OSError, "the share is away"))
    job.begin()
    heard = job.resume()
    assert [type(one) for one in heard] == [OSError, BarrierAbortedError, BarrierAbortedError]
    assert "the share is away" in str(heard[2])


# ---------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 2}, "replicas = 2 is of local saves"),
        ({"persist_every": 2}, "persist_every = 2 is of local saves"),
        ({"local": "here", "replicas": -1}, "replicas = -1: it must be at least 0"),
        ({"local": "here", "replicas": 17}, "replicas = 17: it must be at most 16"),
        ({"local": "here", "persist_every": 0}, "persist_every = 0: it must be at least 1"),
        ({"local": "here", "storage_options": {"profile": "a"}}, "is a folder"),
    ],
)
def test_settings_that_are_not_usable_are_refused(tmp_path: Path, options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path, barrier=FakeBarrier(), **options)  # type: ignore[arg-type]


def test_job_without_a_coordinator_has_no_local_saves(tmp_path: Path):
    with pytest.raises(MusterError, match="needs a coordinator"):
        Checkpointer(
            tmp_path / "shared",
            local=tmp_path,
            barrier=LocalBarrier("save", "job", 0),  # type: ignore[arg-type]
        )


def test_wait_for_is_refused_without_local(tmp_path: Path):
    made = Checkpointer(tmp_path, barrier=FakeBarrier())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave wait_for out"):
        made.save(1, {}, wait_for="replicated")
    made.close()


def test_unknown_level_is_refused(job: LocalJob):
    job.begin()
    heard = job.all(lambda one, rank: one.save(1, state(1, rank), wait_for="everywhere"))  # type: ignore[arg-type]
    assert [type(one) for one in heard] == [ValueError] * 3
    job.save(2)


def test_wait_for_replicated_is_refused_without_replicas(job: LocalJob):
    job.begin(replicas=0)
    heard = job.all(lambda one, rank: one.save(1, state(1, rank), wait_for="replicated"))
    assert [type(one) for one in heard] == [ValueError] * 3


def test_second_group_with_local_saves_is_refused(job: LocalJob):
    job.begin()
    member = job.members[0].sibling("another")
    with pytest.raises(ValueError, match="give only one Checkpointer local="):
        Checkpointer(job.shared, local=job.folder / "node-0", barrier=member)  # type: ignore[arg-type]


def test_level_without_local_saves_is_that_of_shared_storage(tmp_path: Path):
    made = Checkpointer(tmp_path, barrier=FakeBarrier())  # type: ignore[arg-type]
    made.save(1, state(1))
    assert made.finalize(blocking=True) == [1]
    assert (made.level(1), made.level(2)) == (Level.PERSISTED, None)
    made.close()


def test_relative_folder_becomes_absolute_for_keepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("here") == str(tmp_path / "here")
    assert absolute("file:///there") == "/there"
    assert absolute("memory://bucket/job") == "memory://bucket/job"
