"""Jobs that DeepSpeed trains while ranks fail: with Muster's adapter, or without."""

from functools import partial
from pathlib import Path

import pytest

from lab.patience import PATIENCE, until
from lab.processes.coordinator import Coordinator
from muster.checkpoint.committed import MARKER
from tests.support.jobs.fault import FAULTY, SAVES
from tests.support.jobs.lives import RANKS, Life
from tests.support.saves.damage import flip

WORDS = ("resumed", "mixed", "saved", "failed", "latest")


@pytest.fixture(autouse=True)
def _on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def live(coordinator: Coordinator, folder: Path, number: int, arguments: str) -> Life:
    """``arguments``: MODE STAGE WRITER TAG [WHO WHAT WHEN]."""
    return Life(coordinator, "deepspeed_job", folder, number, str(folder / "out"), *arguments.split())


def said(life: Life) -> list[list[str]]:
    """By rank; DeepSpeed has words of its own."""
    return [[line for line in life.said(rank) if line.startswith(WORDS)] for rank in range(RANKS)]


def speaks(life: Life) -> bool:
    return any(said(life))


def names(folder: Path) -> set[str]:
    """The checkpoints, and what else there is but DeepSpeed's scripts."""
    return {path.name for path in (folder / "out").iterdir() if not path.name.startswith("zero_to_")}


def through_all_faults(folder: Path, stage: int, moments: list[str]) -> None:
    """One job, of which each life ends at its third save, but for the last one, in which that save fails."""
    with Coordinator(folder, session_ttl=2.0) as coordinator:
        number, step = 0, 0
        for number, when in enumerate(moments):
            life = live(coordinator, folder, number, f"committed {stage} default last 1 kill {when}")
            life.end()
            survivor, killed = said(life)
            resumed = [f"resumed {step}"] if number else []
            assert killed == [*resumed, f"saved {step + 1}", f"saved {step + 2}"]
            assert survivor[: len(killed)] == killed
            step += 2
            assert [line.split()[:2] for line in survivor[len(killed) :]] == [["failed", str(step + 1)]]
            for told in (survivor[-1], life.logged(0)):
                assert "lost rank 1 (" in told
                assert f"pid {life.ranks[1].pid}, connection lost" in told
        life = live(coordinator, folder, number + 1, f"committed {stage} default last 1 raise writing")
        until(partial(speaks, life), partial(life.logged, 0))
        coordinator.kill()
        coordinator.session_ttl = PATIENCE  # Nobody is lost any more.
        coordinator.start()
        life.end()
        for lines in said(life):
            assert [line.split()[:2] for line in lines] == [
                ["resumed", str(step)],
                *(
                    ["failed" if save == FAULTY else "saved", str(step + save)]
                    for save in range(1, SAVES + 1)
                ),
                ["latest", "last"],
            ]
            assert "No space left on device" in lines[FAULTY]
            assert f"pid {life.ranks[1].pid}) failed" in lines[FAULTY]
        assert names(folder) == {"last", "latest"}, "something was left over"


def test_killed_or_failed_rank_is_named_and_no_torn_save_is_resumed(tmp_path: Path, thorough: bool):
    moments = ["before", "writing", "after"] if thorough else ["writing"]
    for stage in (1, 2, 3) if thorough else (3,):
        folder = tmp_path / f"stage-{stage}"
        folder.mkdir()
        through_all_faults(folder, stage, moments)


def test_all_resume_from_the_previous_step_if_one_rank_finds_damage(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        live(coordinator, tmp_path, 0, "committed 1 default steps").end()
        (file,) = (tmp_path / "out" / f"global_step{SAVES}").glob("*_rank_1_*")
        flip(file)
        life = live(coordinator, tmp_path, 1, "committed 1 default steps")
        life.end()
        for lines in said(life):
            assert lines[:2] == [f"resumed {SAVES - 1}", f"saved {SAVES}"], life.logged(0)


@pytest.mark.thorough_only  # Gloo waits for 20 s.
def test_rank_in_a_hanging_collective_learns_the_missing_rank(tmp_path: Path):
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        life = live(coordinator, tmp_path, 0, "committed 2 default last 1 stop before")
        life.end(but=1)
        assert f"pid {life.ranks[1].pid}" in life.logged(0)
        assert said(life)[0][-1].startswith(f"failed {FAULTY} ")
        assert "lost rank 1 (" in said(life)[0][-1]


def test_dead_decoupled_writer_fails_the_save_and_latest_stays(tmp_path: Path):
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        life = live(coordinator, tmp_path, 0, "committed 3 decoupled steps 1 writer before")
        life.end()
        assert said(life) == [[f"saved {step}" for step in range(1, FAULTY + 1)]] * RANKS, (
            "it was to be written"
        )
        for rank in range(RANKS):
            assert f"pid {life.ranks[1].pid}) failed: RuntimeError" in life.logged(rank)
            assert "checkpoint process is not running" in life.logged(rank)
        assert (tmp_path / "out" / "latest").read_text() == f"global_step{FAULTY - 1}"
        committed = {path.parent.name for path in (tmp_path / "out").glob(f"*/{MARKER}")}
        assert committed == {f"global_step{step}" for step in range(1, FAULTY)}


def test_deepspeed_itself_goes_on_with_the_weights_of_two_steps(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        live(coordinator, tmp_path, 0, "plain 1 default last 1 kill writing").end()
        life = live(coordinator, tmp_path, 1, "plain 1 default last")
        life.end()
        for lines in said(life):
            assert lines[:3] == [f"resumed {FAULTY}", f"mixed {FAULTY + 1}", f"saved {FAULTY + 1}"]
