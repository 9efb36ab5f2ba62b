"""Jobs of JAX that save with Orbax while processes fail: with Muster's barrier, or with JAX's own."""

from pathlib import Path

import pytest

from lab.patience import until
from lab.processes.coordinator import Coordinator
from tests.support.jobs.fault import FAULTY, SAVES
from tests.support.jobs.generations import RANKS, JobGeneration

WHOLE = [
    "saved 1",
    "saved 2",
    "resumed 2",
    *(f"saved {step}" for step in range(FAULTY, SAVES + 1)),
    f"ended {SAVES}",
]


class Job:
    """A job: its generations."""

    def __init__(self, coordinator: Coordinator, folder: Path) -> None:
        self._coordinator, self._folder = coordinator, folder

    def start(self, number: int, *arguments: str) -> JobGeneration:
        return JobGeneration(
            self._coordinator, "orbax_job", self._folder, number, str(self._folder / "out"), *arguments
        )


def said_by(generation: JobGeneration, rank: int) -> list[str]:
    """What a process said, without what Gloo says."""
    return [line for line in generation.said(rank) if not line.startswith("[Gloo]")]


def wait_for_output(generation: JobGeneration) -> None:
    """Wait for its first word."""
    until(lambda: said_by(generation, 0), lambda: generation.logged(0))


def test_killed_process_is_named_and_the_previous_save_is_resumed(tmp_path: Path, thorough: bool):
    modes = ("committed", "checkpointer") if thorough else ("committed",)
    for mode in modes:
        for when in ("before", "writing", "after") if thorough else ("before", "writing"):
            (folder := tmp_path / f"{mode}-{when}").mkdir()
            with Coordinator(folder, session_ttl=2.0) as coordinator:
                job = Job(coordinator, folder)
                generation = job.start(0, mode, "1", "kill", when)
                generation.end()
                said = said_by(generation, 0)
                assert said[:2] == ["saved 1", "saved 2"], generation.logged(0)
                assert said[2].startswith(f"failed {FAULTY} MemberLostError "), (said, generation.logged(0))
                assert "lost rank 1 (" in said[2]
                assert f"pid {generation.ranks[1].pid}" in said[2]
                if thorough or when == "writing":
                    generation = job.start(1, mode)
                    generation.end()
                    for rank in range(RANKS):
                        said = said_by(generation, rank)
                        assert said[0] == f"resumed {FAULTY - 1}", (said, generation.logged(rank))
                        assert said[-1] == f"ended {2 * SAVES}", (said, generation.logged(rank))


@pytest.mark.parametrize(("mode", "first"), [("committed", 0), ("checkpointer", 1)])
def test_process_that_raises_fails_the_save_for_all_and_all_train_on(
    tmp_path: Path, mode: str, first: int, thorough: bool
):
    cases = [(first, "writing"), (1 - first, "writing"), (0, "after"), (1, "after")]
    for who, when in cases if thorough else cases[:1]:
        (folder := tmp_path / f"{who}-{when}").mkdir()
        with Coordinator(folder) as coordinator:
            generation = Job(coordinator, folder).start(0, mode, str(who), "raise", when)
            wait_for_output(generation)
            coordinator.kill()  # In the midst of its saves.
            coordinator.start()
            generation.end()
            for rank in range(RANKS):
                said = said_by(generation, rank)
                failed = said.pop(2)
                assert failed.startswith("failed "), (said, generation.logged(rank))
                assert "No space left on device" in failed
                assert said == WHOLE, generation.logged(rank)


def test_ranks_wait_for_the_timeout_without_a_reason_in_plain_mode(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        generation = Job(coordinator, tmp_path).start(0, "plain", "1", "raise", "writing")
        generation.end()
        for rank in range(RANKS):
            said = said_by(generation, rank)
            assert len(said) == 3, f"{said}\n{generation.logged(rank)}"
            assert "DEADLINE_EXCEEDED" in said[2], generation.logged(rank)
            assert "No space left on device" not in said[2]
        assert "No space left on device" not in generation.logged(0)
