"""Jobs that train with Transformers' Trainer while ranks fail: with Muster's callback, or without."""

import random
import time
from pathlib import Path

from tests.support.coordinator import Coordinator
from tests.support.lives import RANKS, Life
from tests.support.transformers_job import FAULTY, STEPS


def live(coordinator: Coordinator, folder: Path, number: int, *arguments: str) -> Life:
    return Life(coordinator, "transformers_job.py", folder, number, str(folder / "out"), *arguments)


def resumed(coordinator: Coordinator, folder: Path, mode: str) -> list[str]:
    """What the ranks of the next life say first."""
    life = live(coordinator, folder, 1, mode)
    life.end()
    said = [life.said(rank) for rank in range(RANKS)]
    for lines in said:
        assert lines[-1] == f"ended {2 * STEPS}", said
    return [lines[0] for lines in said]


def test_a_rank_that_is_killed_is_named_and_what_was_saved_before_is_resumed(tmp_path: Path, thorough: bool):
    for when in ("before", "writing", "after") if thorough else ("writing",):
        folder = tmp_path / when
        folder.mkdir()
        with Coordinator(folder, session_ttl=2.0) as coordinator:
            life = live(coordinator, folder, 0, "committed", "1", "kill", when)
            life.end()
            assert life.said(0)[:2] == ["saved 1", "saved 2"]
            assert "lost rank 1 (" in life.said(0)[2]
            assert f"pid {life.ranks[1].pid}" in life.said(0)[2]
            assert f"pid {life.ranks[1].pid}" in life.logged(0)
            assert resumed(coordinator, folder, "committed") == [f"resumed {FAULTY - 1} whole"] * RANKS
            names = {path.name for path in (folder / "out").iterdir()}
            assert names == {f"checkpoint-{2 * STEPS - 1}", f"checkpoint-{2 * STEPS}"}, "something was left"


def test_a_rank_that_raises_fails_the_save_of_all_and_all_train_on_from_the_last_one(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        life = live(coordinator, tmp_path, 0, "committed", "1", "raise", "writing")
        life.speaks()
        coordinator.kill()  # In the midst of its saves.
        coordinator.start()
        life.end()
        for rank in range(RANKS):
            said = life.said(rank)
            failed = said.pop(2)
            assert failed.startswith("failed ")
            assert "No space left on device" in failed
            assert said == [
                "saved 1",
                "saved 2",
                "resumed 2 whole",
                *(f"saved {step}" for step in range(FAULTY, STEPS + 1)),
                f"ended {STEPS}",
            ]


def test_whenever_a_rank_is_killed_all_resume_from_a_whole_checkpoint(tmp_path: Path, thorough: bool):
    chance = random.Random(15)
    lives, saves, at = 40 if thorough else 3, 0, 0
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        for number in range(lives):
            life = live(coordinator, tmp_path, number, "committed")
            life.speaks()
            time.sleep(chance.uniform(0.0, 0.3))  # Into one of its saves.
            life.ranks[chance.randrange(RANKS)].kill()
            life.end()
            said = [life.said(rank) for rank in range(RANKS)]
            starts = [line for lines in said for line in lines if line.startswith("resumed")]
            for start in starts:
                assert start in (f"resumed {at} whole", f"resumed {at + 1} whole"), (start, at)
            assert len(set(starts)) <= 1, said
            at = max((int(start.split()[1]) for start in starts), default=at)
            committed = {int(line.split()[1]) for lines in said for line in lines if line.startswith("saved")}
            saves += len(committed)
            at = max(committed, default=at)
    print(f"{saves} saves in {lives} lives, each of which lost a rank")
    assert saves


def test_without_it_a_torn_checkpoint_is_resumed_from(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        life = live(coordinator, tmp_path, 0, "plain", "1", "kill", "writing")
        life.end()
        assert resumed(coordinator, tmp_path, "plain") == [f"resumed {FAULTY} torn"] * RANKS
