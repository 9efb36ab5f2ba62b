"""Jobs of Transformers' Trainer and of Accelerate while ranks fail: with Muster's saves, or without."""

from pathlib import Path

import pytest

from lab.processes.coordinator import Coordinator
from tests.support.jobs.fault import FAULTY, SAVES
from tests.support.jobs.lives import RANKS, Life
from tests.support.saves.damage import flip

PROGRAMS = ["transformers_job", "accelerate_job"]


class Job:
    """A job of one of the programs: its lives."""

    def __init__(self, coordinator: Coordinator, folder: Path, program: str) -> None:
        self.folder = folder / "out"
        self._given = (coordinator, program, folder)

    def live(self, number: int, *arguments: str) -> Life:
        return Life(*self._given, number, str(self.folder), *arguments)

    def resumed(self, mode: str) -> list[str]:
        """What the ranks of the second life say first."""
        life = self.live(1, mode)
        life.end()
        said = [life.said(rank) for rank in range(RANKS)]
        for rank, lines in enumerate(said):
            assert lines[-1:] == [f"ended {2 * SAVES}"], (said, life.logged(rank))
        return [lines[0] for lines in said]


@pytest.mark.parametrize("program", PROGRAMS)
def test_killed_rank_is_named_and_the_previous_save_is_resumed(tmp_path: Path, program: str, thorough: bool):
    for when in ("before", "writing", "after") if thorough else ("writing",):
        (folder := tmp_path / when).mkdir()
        with Coordinator(folder, session_ttl=2.0) as coordinator:
            job = Job(coordinator, folder, program)
            life = job.live(0, "committed", "1", "kill", when)
            life.end()
            said = life.said(0)
            assert said[:2] == ["saved 1", "saved 2"], life.logged(0)
            assert "lost rank 1 (" in said[2]
            assert f"pid {life.ranks[1].pid}" in said[2]
            assert f"pid {life.ranks[1].pid}" in life.logged(0)
            assert job.resumed("committed") == [f"resumed {FAULTY - 1} whole"] * RANKS
            left = [path for path in folder.glob("out/**/.*") if path.name != ".gitignore"]
            assert not left, "something was left over"


@pytest.mark.parametrize("program", PROGRAMS)
def test_rank_that_raises_fails_the_save_for_all_and_all_train_on(tmp_path: Path, program: str):
    with Coordinator(tmp_path) as coordinator:
        life = Job(coordinator, tmp_path, program).live(0, "committed", "1", "raise", "writing")
        life.speaks()
        coordinator.kill()  # In the midst of its saves.
        coordinator.start()
        life.end()
        for rank in range(RANKS):
            said = life.said(rank)
            failed = said.pop(2)
            assert failed.startswith("failed "), life.logged(rank)
            assert "No space left on device" in failed
            assert said == [
                "saved 1",
                "saved 2",
                "resumed 2 whole",
                *(f"saved {step}" for step in range(FAULTY, SAVES + 1)),
                f"ended {SAVES}",
            ]


def test_all_resume_from_the_previous_save_if_one_rank_finds_damage(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        job = Job(coordinator, tmp_path, "transformers_job")
        job.live(0, "committed").end()
        flip(job.folder / f"checkpoint-{SAVES}" / "rng_state_1.pth")
        assert job.resumed("committed") == [f"resumed {SAVES - 1} whole"] * RANKS


def test_no_rank_resumes_from_the_only_checkpoint_if_it_is_damaged(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        job = Job(coordinator, tmp_path, "accelerate_job")
        job.live(0, "committed").end()
        flip(job.folder / "checkpoints" / f"checkpoint_{SAVES - 1}" / "random_states_0.pkl")
        life = job.live(1, "committed")
        life.end()
        for rank in range(RANKS):
            assert life.said(rank) == []
            assert "CorruptCheckpointError" in life.logged(rank)
            assert "random_states_0.pkl at offset 0: " in life.logged(rank)


def test_without_it_transformers_resumes_from_a_torn_checkpoint(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        job = Job(coordinator, tmp_path, "transformers_job")
        job.live(0, "plain", "1", "kill", "writing").end()
        assert job.resumed("plain") == [f"resumed {FAULTY} torn"] * RANKS


def test_without_it_accelerate_has_deleted_the_last_checkpoint_for_a_torn_one(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        job = Job(coordinator, tmp_path, "accelerate_job")
        job.live(0, "plain", "0", "kill", "writing").end()
        life = job.live(1, "plain")
        life.end()
        assert [life.said(rank) for rank in range(RANKS)] == [[]] * RANKS
        logged = life.logged(0) + life.logged(1)
        assert "FileNotFoundError" in logged or "IndexError" in logged, "as far as rank 1 has come"
