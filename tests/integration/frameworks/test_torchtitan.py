"""Jobs that checkpoint by torchtitan's manager while ranks fail: with Muster's in its place, or without."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from lab.processes.coordinator import Coordinator
from tests.support.jobs.fault import FAULTY
from tests.support.jobs.generations import RANKS, JobGeneration
from tests.support.saves.damage import flip

TRAINED = [f"saved {step}" for step in range(1, FAULTY + 1)]


def run(coordinator: Coordinator, folder: Path, number: int, *arguments: str) -> list[list[str]]:
    """What the ranks of a generation say."""
    generation = JobGeneration(coordinator, "torchtitan_job", folder, number, str(folder / "out"), *arguments)
    generation.end()
    return [generation.said(rank) for rank in range(RANKS)]


@pytest.mark.parametrize("when", ["before", "writing", "after"])
def test_killed_rank_is_named_and_the_previous_save_is_resumed(tmp_path: Path, when: str):
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        generation = JobGeneration(
            coordinator, "torchtitan_job", tmp_path, 0, str(tmp_path / "out"), "committed", "1", "kill", when
        )
        generation.end()
        assert generation.said(0)[:2] == TRAINED[:2]
        assert f"pid {generation.ranks[1].pid}" in generation.logged(0)
        said = run(coordinator, tmp_path, 1, "committed")
        assert said == [[f"resumed {FAULTY - 1} whole", f"saved {FAULTY}"]] * RANKS
        checkpoints = sorted(path.name for path in (tmp_path / "out/checkpoint").iterdir())
        assert checkpoints == [f"step-{FAULTY - 1}", f"step-{FAULTY}"], (
            "two are kept, and nothing is left over"
        )


def test_all_resume_from_the_previous_step_if_one_rank_finds_damage(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        assert run(coordinator, tmp_path, 0, "committed") == [TRAINED] * RANKS
        flip(tmp_path / f"out/checkpoint/step-{FAULTY}" / "__1_0.distcp")
        said = run(coordinator, tmp_path, 1, "committed")
        assert said == [[f"resumed {FAULTY - 1} whole", f"saved {FAULTY}"]] * RANKS
        assert run(coordinator, tmp_path, 2, "committed") == [[f"resumed {FAULTY} whole"]] * RANKS


def test_a_rank_that_raises_fails_the_save_of_all(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        for lines in run(coordinator, tmp_path, 0, "committed", "1", "raise", "writing"):
            assert lines[:-1] == TRAINED[:-1]
            assert lines[-1].startswith(f"failed {FAULTY} ")
            assert "No space left on device" in lines[-1]
        said = run(coordinator, tmp_path, 1, "committed")
        assert said == [[f"resumed {FAULTY - 1} whole", f"saved {FAULTY}"]] * RANKS


@pytest.mark.parametrize(
    ("mode", "resumed"),
    [("committed", [f"resumed {FAULTY} whole"] * RANKS), ("plain", [f"resumed {FAULTY} mixed"] * RANKS)],
)
def test_a_step_that_is_saved_again_is_the_old_one_until_it_is_the_new_one(
    tmp_path: Path, mode: str, resumed: list[str]
):
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        assert run(coordinator, tmp_path, 0, mode) == [TRAINED] * RANKS
        run(coordinator, tmp_path, 1, f"{mode}-back", "1", "kill", "writing")
        said = run(coordinator, tmp_path, 2, mode)
        assert resumed[0] in [lines[0] for lines in said]
        if mode == "committed":
            assert said == [[line] for line in resumed]


def test_uncommitted_checkpoints_do_not_count_towards_the_kept_ones(tmp_path: Path):
    """Nor is it resumed from, though it has the highest number and torch's metadata."""
    torn = [tmp_path / f"out/checkpoint/step-{step}" for step in (8, 9)]
    for folder in torn:
        folder.mkdir(parents=True)
        (folder / ".metadata").touch()
    with Coordinator(tmp_path) as coordinator:
        assert run(coordinator, tmp_path, 0, "committed") == [TRAINED] * RANKS
        assert run(coordinator, tmp_path, 1, "committed") == [[f"resumed {FAULTY} whole"]] * RANKS
    checkpoints = sorted(path.name for path in (tmp_path / "out/checkpoint").iterdir())
    assert checkpoints == [f"step-{FAULTY - 1}", f"step-{FAULTY}", "step-8", "step-9"]


def test_a_last_save_in_safetensors_is_committed_and_not_gone_on_from(tmp_path: Path):
    checkpoint = tmp_path / "out/checkpoint" / f"step-{FAULTY}"
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        run(coordinator, tmp_path, 0, "committed-hf", "1", "kill", "writing")
        assert not checkpoint.exists()
        said = run(coordinator, tmp_path, 1, "committed-hf")
        assert said == [[f"resumed {FAULTY - 1} whole", f"saved {FAULTY}"]] * RANKS
        weights = load_file(checkpoint / "model-00001-of-00001.safetensors")
        assert weights["weight"].tolist() == [[float(FAULTY)]] * RANKS
        said = run(coordinator, tmp_path, 2, "committed")
        assert said == [[f"resumed {FAULTY - 1} whole", f"saved {FAULTY}"]] * RANKS


def test_a_step_that_was_named_and_is_not_committed_is_refused_by_all(tmp_path: Path):
    torn = tmp_path / f"out/checkpoint/step-{FAULTY - 1}"
    torn.mkdir(parents=True)
    (torn / ".metadata").touch()
    with Coordinator(tmp_path) as coordinator:
        generation = JobGeneration(
            coordinator, "torchtitan_job", tmp_path, 0, str(tmp_path / "out"), "committed-back"
        )
        generation.end()
        for rank in range(RANKS):
            assert generation.said(rank) == []
            assert generation.ranks[rank].wait() == 1
        assert f"{torn} is not a committed checkpoint" in generation.logged(0)
        assert "rank 0 (" in generation.logged(1)


def test_job_resumes_from_a_save_of_the_plain_framework(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        assert run(coordinator, tmp_path, 0, "plain") == [TRAINED] * RANKS
        assert run(coordinator, tmp_path, 1, "committed-from") == [[f"resumed {FAULTY} whole"]] * RANKS
