"""What storage does to a committed checkpoint is found before a step is trained, by all ranks together."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.worker.saves import Checkpointer
from tests.support.damaged_job import KINDS, TARGETS, Injection, Job, Resumed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

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


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_damage_of_the_newest_checkpoint_lets_all_ranks_resume_from_the_one_before(
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
        for life in (2, 3):
            assert job.resume(life, loads, world_size) == [Resumed(OLDER)] * loads, (life, done)
        if number % 6 == 0 or thorough:
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
        for life in (2, 3):
            assert job.resume(life, 2, 2) == [expected] * 2, (life, done)
