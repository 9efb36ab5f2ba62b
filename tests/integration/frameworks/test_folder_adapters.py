"""Jobs of Transformers' Trainer and of Accelerate while ranks fail: with Muster's saves, or without."""

from pathlib import Path

import pytest

from lab.processes.coordinator import Coordinator
from tests.support.jobs.fault import FAULTY, SAVES
from tests.support.jobs.generations import RANKS, JobGeneration
from tests.support.saves.damage import flip

PROGRAMS = ["transformers_job", "accelerate_job"]


class Job:
    """A job of one of the programs: its generations."""

    def __init__(self, coordinator: Coordinator, folder: Path, program: str) -> None:
        self.folder = folder / "out"
        self._given = (coordinator, program, folder)

    def start(self, number: int, *arguments: str) -> JobGeneration:
        return JobGeneration(*self._given, number, str(self.folder), *arguments)

    def resumed(self, mode: str) -> list[str]:
        """What the ranks of the second generation say first."""
        generation = self.start(1, mode)
        generation.end()
        said = [generation.said(rank) for rank in range(RANKS)]
        for rank, lines in enumerate(said):
            assert lines[-1:] == [f"ended {2 * SAVES}"], (said, generation.logged(rank))
        return [lines[0] for lines in said]


@pytest.mark.parametrize("program", PROGRAMS)
def test_killed_rank_is_named_and_the_previous_save_is_resumed(tmp_path: Path, program: str, thorough: bool):
    for when in ("before", "writing", "after") if thorough else ("writing",):
        (folder := tmp_path / when).mkdir()
        with Coordinator(folder, session_ttl=2.0) as coordinator:
            job = Job(coordinator, folder, program)
            generation = job.start(0, "committed", "1", "kill", when)
            generation.end()
            said = generation.said(0)
            assert said[:2] == ["saved 1", "saved 2"], generation.logged(0)
            assert "lost rank 1 (" in said[2]
            assert f"pid {generation.ranks[1].pid}" in said[2]
            assert f"pid {generation.ranks[1].pid}" in generation.logged(0)
            assert job.resumed("committed") == [f"resumed {FAULTY - 1} whole"] * RANKS
            left = [path for path in folder.glob("out/**/.*") if path.name != ".gitignore"]
            assert not left, "something was left over"


@pytest.mark.parametrize("program", PROGRAMS)
def test_rank_that_raises_fails_the_save_for_all_and_all_train_on(tmp_path: Path, program: str):
    with Coordinator(tmp_path) as coordinator:
        generation = Job(coordinator, tmp_path, program).start(0, "committed", "1", "raise", "writing")
        generation.wait_for_output()
        coordinator.kill()  # In the midst of its saves.
        coordinator.start()
        generation.end()
        for rank in range(RANKS):
            said = generation.said(rank)
            failed = said.pop(2)
            assert failed.startswith("failed "), generation.logged(rank)
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
        job.start(0, "committed").end()
        flip(job.folder / f"checkpoint-{SAVES}" / "rng_state_1.pth")
        assert job.resumed("committed") == [f"resumed {SAVES - 1} whole"] * RANKS


def test_no_rank_resumes_from_the_only_checkpoint_if_it_is_damaged(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        job = Job(coordinator, tmp_path, "accelerate_job")
        job.start(0, "committed").end()
        flip(job.folder / "checkpoints" / f"checkpoint_{SAVES - 1}" / "random_states_0.pkl")
        generation = job.start(1, "committed")
        generation.end()
        for rank in range(RANKS):
            assert generation.said(rank) == []
            assert "CorruptCheckpointError" in generation.logged(rank)
            assert "random_states_0.pkl at offset 0: " in generation.logged(rank)


def test_without_it_transformers_resumes_from_a_torn_checkpoint(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        job = Job(coordinator, tmp_path, "transformers_job")
        job.start(0, "plain", "1", "kill", "writing").end()
        assert job.resumed("plain") == [f"resumed {FAULTY} torn"] * RANKS


def test_without_it_accelerate_has_deleted_the_last_checkpoint_for_a_torn_one(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        job = Job(coordinator, tmp_path, "accelerate_job")
        job.start(0, "plain", "0", "kill", "writing").end()
        generation = job.start(1, "plain")
        generation.end()
        assert [generation.said(rank) for rank in range(RANKS)] == [[]] * RANKS
        logged = generation.logged(0) + generation.logged(1)
        assert "FileNotFoundError" in logged or "IndexError" in logged, "as far as rank 1 has come"
