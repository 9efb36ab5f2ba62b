"""What storage does to a committed checkpoint is found before a step is trained, by all ranks together."""

import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator
from muster.checkpoint import retry
from muster.checkpoint.damage import DAMAGED
from muster.v1 import barrier_pb2, barrier_pb2_grpc
from muster.worker.saves import Checkpointer
from tests.support.crashes.faults import BUCKET, ERRORS, FOLDER, Fault, failing, short, wrong
from tests.support.saves.damage import flip
from tests.support.saves.damaged_job import KINDS, TARGETS, Injection, Job, Resumed
from tests.support.saves.savers import Failed, Saver, all_of, savers

OLDER, NEWEST = 1, 2
DOSE = 24
"""Injections for each place and world size: each kind at each target."""
THOROUGH_DOSE = 267
"""1,602 in all."""
WORLDS = {1: 2, 2: 4, 4: 1}
"""The world sizes, and another one that loads what each has saved."""


@pytest.fixture(autouse=True)
def _ranks_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's process group does not know of them."""
    monkeypatch.setattr(Checkpointer, "_check_group", lambda _: None)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_ranks_resume_from_an_older_checkpoint_if_the_newest_is_damaged(
    tmp_path: Path, place: str, world_size: int, thorough: bool
):
    whole = Job(tmp_path / "whole", bucket=place == "bucket")
    whole.folder.mkdir()
    whole.save(0, world_size, [OLDER, NEWEST])
    for number, injection in enumerate(injections(THOROUGH_DOSE if thorough else DOSE)):
        loads = world_size if number % 2 else WORLDS[world_size]
        assert whole.resume(1, loads, world_size) == [Resumed(NEWEST)] * loads, "a false alarm"
        job = whole.copy(tmp_path / f"damaged-{number}")
        done = injection.inject(job, NEWEST, OLDER)
        for generation in (2, 3):
            assert job.resume(generation, loads, world_size) == [Resumed(OLDER)] * loads, (generation, done)
        if number % 6 == 0:
            job.save(4, world_size, [NEWEST], version=1)
            assert job.resume(5, loads, world_size) == [Resumed(NEWEST, version=1)] * loads, done


def injections(count: int) -> Iterator[Injection]:
    """Each kind at each target, again and again with other seeds."""
    every = [(target, kind) for target, kind in itertools.product(TARGETS, KINDS)]
    random.Random(29).shuffle(every)
    for number in range(count):
        target, kind = every[number % len(every)]
        yield Injection(target, kind, number)


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_damage_of_the_only_checkpoint_is_an_error_on_all_ranks(tmp_path: Path, place: str, thorough: bool):
    whole = Job(tmp_path / "whole", bucket=place == "bucket")
    whole.folder.mkdir()
    whole.save(0, 2, [OLDER, NEWEST])
    for number, injection in enumerate(injections(240 if thorough else 24)):
        job = whole.copy(tmp_path / f"damaged-{number}")
        done = injection.inject(job, NEWEST, OLDER)
        job.remove(OLDER)
        # A bucket's save without a verdict is one that was never committed.
        uncommitted = (place, injection.target, injection.kind) == ("bucket", "marker", "drop")
        expected = Resumed(None, error="" if uncommitted else "CorruptCheckpointError")
        for generation in (2, 3):
            assert job.resume(generation, 2, 2) == [expected] * 2, (generation, done)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_ranks_resume_from_the_last_undamaged_checkpoint(tmp_path: Path, place: str, thorough: bool):
    """The order of commits is not that of steps: the job went back twice."""
    steps = [3, 5, 4, 2]
    whole = Job(tmp_path / "whole", bucket=place == "bucket")
    whole.folder.mkdir()
    whole.save(0, 2, steps)
    chance = random.Random(29)
    for number in range(120 if thorough else 12):
        job = whole.copy(tmp_path / f"damaged-{number}")
        damaged = chance.sample(steps, chance.randint(1, len(steps)))
        kinds = [kind for kind in KINDS if kind not in ("stale", "drop")]
        for step in damaged:
            Injection(chance.choice(TARGETS), chance.choice(kinds), number).inject(job, step, step)
        left = [step for step in steps if step not in damaged]
        expected = Resumed(left[-1]) if left else Resumed(None, error="CorruptCheckpointError")
        for generation in (2, 3):
            assert job.resume(generation, 2, 2) == [expected] * 2, (generation, damaged)


# ---------------------------------------------------------------------- storage that fails


@pytest.fixture(params=["folder", "bucket"])
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Job:
    """A job of two ranks, which has saved two steps. Nothing waits before it reads again."""
    monkeypatch.setattr(retry, "DELAYS", (0.0, 0.0, 0.0))
    job = Job(tmp_path / "place", bucket=request.param == "bucket")
    job.folder.mkdir()
    job.save(0, 2, [OLDER, NEWEST])
    return job


def marks(job: Job) -> list[Path]:
    return list(job.folder.glob(f"*/{DAMAGED}"))


def test_error_that_stays_is_an_error_on_all_ranks_and_never_an_older_step(kept: Job):
    """Nor is it taken for an empty place, or for damage: when it has gone, all resume."""
    for reading in (BUCKET if kept.bucket else FOLDER).values():
        for number in ERRORS:
            with pytest.MonkeyPatch.context() as patched:
                fault = Fault(reading, failing(number))
                fault.install(patched)
                heard = kept.resume(1, 2, 2)
            assert fault.struck, reading
            assert all(one.step is None and one.error for one in heard), (reading, heard)
            assert "CorruptCheckpointError" not in {one.error for one in heard}, reading
            assert marks(kept) == []
    assert kept.resume(2, 2, 2) == [Resumed(NEWEST)] * 2


@pytest.mark.parametrize("kept", ["folder"], indirect=True)
def test_error_that_passes_is_not_noticed(kept: Job):
    """A bucket's client asks again by itself."""
    for reading, number in itertools.product(FOLDER.values(), ERRORS):
        with pytest.MonkeyPatch.context() as patched:
            fault = Fault(reading, failing(number), times=2)
            fault.install(patched)
            assert kept.resume(1, 2, 2) == [Resumed(NEWEST)] * 2, reading
        assert fault.struck == 2, reading
    assert marks(kept) == []


@pytest.mark.parametrize("strike", [wrong, short])
def test_wrong_bytes_that_are_right_when_read_again_are_not_noticed(kept: Job, strike: Callable[..., Any]):
    readings = BUCKET if kept.bucket else FOLDER
    for name in ("verdict" if kept.bucket else "marker", "manifest", "metadata", "data"):
        with pytest.MonkeyPatch.context() as patched:
            fault = Fault(readings[name], strike, times=1)
            fault.install(patched)
            assert kept.resume(1, 2, 2) == [Resumed(NEWEST)] * 2, name
        assert fault.struck == 1, name
    assert marks(kept) == []


# ---------------------------------------------------------------------- real processes


@pytest.mark.parametrize("doom", ["opening", "reading"])
def test_rank_that_dies_during_a_load_is_named_and_the_restart_loads_again(tmp_path: Path, doom: str):
    folder = tmp_path / "checkpoints"
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        with savers(coordinator.endpoint, 2, folder) as world:
            all_of(world, "begin")
            for step in (OLDER, NEWEST):
                all_of(world, "save", step=step)
            assert all_of(world, "finalize") == [[OLDER, NEWEST]] * 2
            world[1].tell("resume", doom=doom)
            heard = world[0].ask("resume")
            assert isinstance(heard, Failed)
            assert "rank 1 (node-1" in heard.message, heard
        with savers(coordinator.endpoint, 2, folder, generation=1) as world:
            all_of(world, "begin")
            assert all_of(world, "resume") == [(NEWEST, True)] * 2
    assert not list(folder.glob(f"*/{DAMAGED}"))


RANKS = 3
VERDICT = 3
"""The number of the vote, in a load, by which a rank says whether what it read of the newest is whole."""


@pytest.fixture
def ranks(coordinator: Coordinator, tmp_path: Path) -> Iterator[list[Saver]]:
    """Three ranks that have saved two steps. Rank 1 alone reads the damaged file of the newest one.

    However its load ends, the restarted job resumes from the older step.
    """
    folder = tmp_path / "checkpoints"
    with savers(coordinator.endpoint, RANKS, folder) as world:
        all_of(world, "begin")
        for step in (OLDER, NEWEST):
            all_of(world, "save", step=step)
        assert all_of(world, "finalize") == [[OLDER, NEWEST]] * RANKS
        flip(folder / f"step-{NEWEST:010}" / "__1_0.distcp")
        yield world
    with savers(coordinator.endpoint, RANKS, folder, generation=1) as world:
        all_of(world, "begin")
        assert all_of(world, "resume") == [(OLDER, True)] * RANKS
    assert [path.parent.name for path in folder.glob(f"*/{DAMAGED}")] == [f"step-{NEWEST:010}"]


def told_by_the_others(ranks: list[Saver]) -> list[Any]:
    return [ranks[rank].answer() for rank in (0, 2)]


def all_name_rank_1(heard: list[Any]) -> bool:
    return all(
        isinstance(one, Failed) and one.kind == "MemberLostError" and "rank 1 (node-1" in one.message
        for one in heard
    )


@pytest.mark.parametrize(("vote", "steps_down"), [(VERDICT, False), (2 * VERDICT, True)])
def test_rank_that_dies_after_its_verdict_leaves_all_others_alike(
    ranks: list[Saver], vote: int, steps_down: bool
):
    """It has arrived, and never acts on the decision. Its first verdict is damage, its last one is good."""
    ranks[1].tell("resume", doom="voted", vote=vote)
    for rank in (0, 2):
        ranks[rank].tell("resume")
    heard = told_by_the_others(ranks)
    assert heard == [(OLDER, True)] * 2 if steps_down else all_name_rank_1(heard), heard


def test_rank_that_dies_before_the_others_vote_leaves_all_others_alike(
    coordinator: Coordinator, ranks: list[Saver], tmp_path: Path
):
    """Nobody but the dead knows of the damage."""
    gate = tmp_path / "gate"
    ranks[1].tell("resume")
    for rank in (0, 2):
        ranks[rank].tell("resume", vote=VERDICT, gate=str(gate))
    with grpc.insecure_channel(coordinator.endpoint) as channel:
        barriers = barrier_pb2_grpc.BarrierServiceStub(channel)
        until(lambda: arrived(barriers, VERDICT - 1) == 1)
    ranks[1].end()
    gate.touch()
    heard = told_by_the_others(ranks)
    assert all_name_rank_1(heard), heard


def arrived(barriers: barrier_pb2_grpc.BarrierServiceStub, sequence: int) -> int:
    """How many ranks have arrived at a barrier of the load."""
    asked = barrier_pb2.BarrierServiceGetRequest(run_id="saves", prefix="save/load", sequence=sequence)
    try:
        return barriers.Get(asked, timeout=PATIENCE).barrier.arrived
    except grpc.RpcError:
        return 0  # There is no such barrier yet.


def test_damage_of_one_ranks_shard_lets_another_world_resume_from_the_step_before(tmp_path: Path):
    """Sharded tensors, torch's process group, and a coordinator: each rank reads parts of both files."""
    folder = tmp_path / "checkpoints"
    with Coordinator(tmp_path) as coordinator:
        with savers(coordinator.endpoint, 2, folder) as world:
            all_of(world, "begin")
            for step in (1, 2, 3):
                all_of(world, "save", step=step)
            assert all_of(world, "finalize") == [[1, 2, 3]] * 2
        job = Job(folder, bucket=False)
        Injection("data", "flip", 0).inject(job, 3, 2)
        with savers(coordinator.endpoint, 2, folder, generation=1) as world:
            all_of(world, "begin")
            assert all_of(world, "resume") == [(2, True)] * 2
        Injection("metadata", "stale", 0).inject(job, 2, 1)
        with savers(coordinator.endpoint, 3, folder, generation=2) as world:
            all_of(world, "begin")
            assert all_of(world, "resume") == [(1, True)] * 3
            all_of(world, "save", step=2)
            assert all_of(world, "finalize") == [[2]] * 3
            assert all_of(world, "resume") == [(2, True)] * 3
