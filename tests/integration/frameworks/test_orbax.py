"""Jobs of JAX that save with Orbax while processes fail: with Muster's barrier, or with JAX's own."""

from pathlib import Path

import pytest

from lab.patience import until
from lab.processes.coordinator import Coordinator
from tests.support.jobs.fault import FAULTY, SAVES
from tests.support.jobs.lives import RANKS, Life

WHOLE = [
    "saved 1",
    "saved 2",
    "resumed 2",
    *(f"saved {step}" for step in range(FAULTY, SAVES + 1)),
    f"ended {SAVES}",
]


class Job:
    """A job: its lives."""

    def __init__(self, coordinator: Coordinator, folder: Path) -> None:
        self._coordinator, self._folder = coordinator, folder

    def live(self, number: int, *arguments: str) -> Life:
        return Life(
            self._coordinator, "orbax_job", self._folder, number, str(self._folder / "out"), *arguments
        )


def said_by(life: Life, rank: int) -> list[str]:
    """What a process said, without what Gloo says."""
    return [line for line in life.said(rank) if not line.startswith("[Gloo]")]


def speaks(life: Life) -> None:
    """Wait for its first word."""
    until(lambda: said_by(life, 0), lambda: life.logged(0))


def test_killed_process_is_named_and_the_previous_save_is_resumed(tmp_path: Path, thorough: bool):
    modes = ("committed", "checkpointer") if thorough else ("committed",)
    for mode in modes:
        for when in ("before", "writing", "after") if thorough else ("before", "writing"):
            (folder := tmp_path / f"{mode}-{when}").mkdir()
            with Coordinator(folder, session_ttl=2.0) as coordinator:
                job = Job(coordinator, folder)
                life = job.live(0, mode, "1", "kill", when)
                life.end()
                said = said_by(life, 0)
                assert said[:2] == ["saved 1", "saved 2"], life.logged(0)
                assert said[2].startswith(f"failed {FAULTY} MemberLostError "), (said, life.logged(0))
                assert "lost rank 1 (" in said[2]
                assert f"pid {life.ranks[1].pid}" in said[2]
                if thorough or when == "writing":
                    life = job.live(1, mode)
                    life.end()
                    for rank in range(RANKS):
                        said = said_by(life, rank)
                        assert said[0] == f"resumed {FAULTY - 1}", (said, life.logged(rank))
                        assert said[-1] == f"ended {2 * SAVES}", (said, life.logged(rank))


@pytest.mark.parametrize(("mode", "first"), [("committed", 0), ("checkpointer", 1)])
def test_process_that_raises_fails_the_save_for_all_and_all_train_on(
    tmp_path: Path, mode: str, first: int, thorough: bool
):
    cases = [(first, "writing"), (1 - first, "writing"), (0, "after"), (1, "after")]
    for who, when in cases if thorough else cases[:1]:
        (folder := tmp_path / f"{who}-{when}").mkdir()
        with Coordinator(folder) as coordinator:
            life = Job(coordinator, folder).live(0, mode, str(who), "raise", when)
            speaks(life)
            coordinator.kill()  # In the midst of its saves.
            coordinator.start()
            life.end()
            for rank in range(RANKS):
                said = said_by(life, rank)
                failed = said.pop(2)
                assert failed.startswith("failed "), (said, life.logged(rank))
                assert "No space left on device" in failed
                assert said == WHOLE, life.logged(rank)


def test_ranks_wait_for_the_timeout_without_a_reason_in_plain_mode(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        life = Job(coordinator, tmp_path).live(0, "plain", "1", "raise", "writing")
        life.end()
        for rank in range(RANKS):
            said = said_by(life, rank)
            assert len(said) == 3, f"{said}\n{life.logged(rank)}"
            assert "DEADLINE_EXCEEDED" in said[2], life.logged(rank)
            assert "No space left on device" not in said[2]
        assert "No space left on device" not in life.logged(0)
