"""Jobs that DeepSpeed trains while ranks fail: with Muster's adapter, or without."""

from functools import partial
from pathlib import Path

import pytest

from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator
from muster.checkpoint.committed import MARKER
from tests.support.jobs.fault import FAULTY, SAVES
from tests.support.jobs.generations import RANKS, JobGeneration
from tests.support.saves.damage import flip

WORDS = ("resumed", "mixed", "saved", "failed", "latest")


@pytest.fixture(autouse=True)
def _on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def start(coordinator: Coordinator, folder: Path, number: int, arguments: str) -> JobGeneration:
    """``arguments``: MODE STAGE WRITER TAG [WHO WHAT WHEN]."""
    return JobGeneration(
        coordinator, "deepspeed_job", folder, number, str(folder / "out"), *arguments.split()
    )


def said(generation: JobGeneration) -> list[list[str]]:
    """By rank; DeepSpeed has words of its own."""
    return [[line for line in generation.said(rank) if line.startswith(WORDS)] for rank in range(RANKS)]


def has_output(generation: JobGeneration) -> bool:
    return any(said(generation))


def names(folder: Path) -> set[str]:
    """The checkpoints, and what else there is but DeepSpeed's scripts."""
    return {path.name for path in (folder / "out").iterdir() if not path.name.startswith("zero_to_")}


def through_all_faults(folder: Path, stage: int, moments: list[str]) -> None:
    """Kill a rank at the third save of each generation. In the last one, let that save fail instead."""
    with Coordinator(folder, session_ttl=2.0) as coordinator:
        number, step = 0, 0
        for number, when in enumerate(moments):
            generation = start(coordinator, folder, number, f"committed {stage} default last 1 kill {when}")
            generation.end()
            survivor, killed = said(generation)
            resumed = [f"resumed {step}"] if number else []
            assert killed == [*resumed, f"saved {step + 1}", f"saved {step + 2}"]
            assert survivor[: len(killed)] == killed
            step += 2
            assert [line.split()[:2] for line in survivor[len(killed) :]] == [["failed", str(step + 1)]]
            for failure in (survivor[-1], generation.logged(0)):
                assert "lost rank 1 (" in failure
                assert f"pid {generation.ranks[1].pid}, connection lost" in failure
        generation = start(coordinator, folder, number + 1, f"committed {stage} default last 1 raise writing")
        until(partial(has_output, generation), partial(generation.logged, 0))
        coordinator.kill()
        coordinator.session_ttl = PATIENCE  # Nobody is lost any more.
        coordinator.start()
        generation.end()
        for lines in said(generation):
            assert [line.split()[:2] for line in lines] == [
                ["resumed", str(step)],
                *(
                    ["failed" if save == FAULTY else "saved", str(step + save)]
                    for save in range(1, SAVES + 1)
                ),
                ["latest", "last"],
            ]
            assert "No space left on device" in lines[FAULTY]
            assert f"pid {generation.ranks[1].pid}) failed" in lines[FAULTY]
        assert names(folder) == {"last", "latest"}, "something was left over"


def test_killed_or_failed_rank_is_named_and_no_torn_save_is_resumed(tmp_path: Path, thorough: bool):
    moments = ["before", "writing", "after"] if thorough else ["writing"]
    for stage in (1, 2, 3) if thorough else (3,):
        folder = tmp_path / f"stage-{stage}"
        folder.mkdir()
        through_all_faults(folder, stage, moments)


def test_all_resume_from_the_previous_step_if_one_rank_finds_damage(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        start(coordinator, tmp_path, 0, "committed 1 default steps").end()
        (file,) = (tmp_path / "out" / f"global_step{SAVES}").glob("*_rank_1_*")
        flip(file)
        generation = start(coordinator, tmp_path, 1, "committed 1 default steps")
        generation.end()
        for lines in said(generation):
            assert lines[:2] == [f"resumed {SAVES - 1}", f"saved {SAVES}"], generation.logged(0)


@pytest.mark.thorough_only  # Gloo waits for 20 s.
def test_rank_in_a_hanging_collective_learns_the_missing_rank(tmp_path: Path):
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        generation = start(coordinator, tmp_path, 0, "committed 2 default last 1 stop before")
        generation.end(but=1)
        assert f"pid {generation.ranks[1].pid}" in generation.logged(0)
        assert said(generation)[0][-1].startswith(f"failed {FAULTY} ")
        assert "lost rank 1 (" in said(generation)[0][-1]


def test_dead_decoupled_writer_fails_the_save_and_latest_stays(tmp_path: Path):
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        generation = start(coordinator, tmp_path, 0, "committed 3 decoupled steps 1 writer before")
        generation.end()
        assert said(generation) == [[f"saved {step}" for step in range(1, FAULTY + 1)]] * RANKS, (
            "it was to be written"
        )
        for rank in range(RANKS):
            assert f"pid {generation.ranks[1].pid}) failed: RuntimeError" in generation.logged(rank)
            assert "checkpoint process is not running" in generation.logged(rank)
        assert (tmp_path / "out" / "latest").read_text() == f"global_step{FAULTY - 1}"
        committed = {path.parent.name for path in (tmp_path / "out").glob(f"*/{MARKER}")}
        assert committed == {f"global_step{step}" for step in range(1, FAULTY)}


def test_deepspeed_itself_goes_on_with_the_weights_of_two_steps(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        start(coordinator, tmp_path, 0, "plain 1 default last 1 kill writing").end()
        generation = start(coordinator, tmp_path, 1, "plain 1 default last")
        generation.end()
        for lines in said(generation):
            assert lines[:3] == [f"resumed {FAULTY}", f"mixed {FAULTY + 1}", f"saved {FAULTY + 1}"]
