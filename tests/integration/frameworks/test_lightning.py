"""Jobs that Lightning trains, while ranks fail: with Muster's strategies, or with Lightning's own."""

from pathlib import Path

import pytest

from lab.patience import PATIENCE
from lab.processes.coordinator import Coordinator
from muster.checkpoint.source import beside
from tests.support.jobs.fault import FAULTY, SAVES
from tests.support.jobs.generations import RANKS, JobGeneration
from tests.support.saves.damage import flip


def start(coordinator: Coordinator, folder: Path, number: int, *arguments: str) -> JobGeneration:
    return JobGeneration(coordinator, "lightning_job", folder, number, str(folder), *arguments)


def said(generation: JobGeneration) -> list[list[str]]:
    """By rank, the first two words of its lines: what it did, and the step."""
    return [[" ".join(line.split()[:2]) for line in generation.said(rank)] for rank in range(RANKS)]


def saved(first: int) -> list[str]:
    return [f"saved {step}" for step in range(first, first + SAVES)]


def resumed(coordinator: Coordinator, folder: Path, kind: str) -> int:
    """The step that all ranks of the next generation resume from, weights and all; then they save."""
    generation = start(coordinator, folder, 1, "committed", kind)
    generation.end()
    first = {generation.said(rank)[0] for rank in range(RANKS)}
    assert len(first) == 1, first
    _, weights, step = first.pop().split()
    assert weights == step
    assert said(generation) == [[f"resumed {step}", *saved(int(step) + 1)]] * RANKS, generation.logged(0)
    # A checkpoint that is one file has its manifest in a folder beside it.
    assert set(folder.glob(".last.ckpt*")) <= {beside(folder / "last.ckpt")}, "something was left over"
    return int(step)


def test_failed_rank_is_named_and_all_resume_from_a_common_step(tmp_path: Path):
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        generation = start(coordinator, tmp_path, 0, "committed", "model_parallel", "1", "kill", "writing")
        generation.end()
        assert said(generation) == [["saved 1", "saved 2", "failed 3"], ["saved 1", "saved 2"]]
        assert "lost rank 1 (" in generation.said(0)[2]
        assert f"pid {generation.ranks[1].pid}" in generation.said(0)[2]
        assert "not all ranks have written save" in generation.logged(0)

        generation = start(coordinator, tmp_path, 1, "committed", "model_parallel", "1", "raise", "writing")
        generation.wait_for_output()
        coordinator.kill()  # In one of its saves.
        coordinator.session_ttl = PATIENCE  # Nobody is lost any more.
        coordinator.start()
        generation.end()
        expected = ["resumed 2", "failed 3", *saved(4)[: SAVES - 1]]
        assert said(generation) == [expected, expected], generation.logged(0)
        for rank in range(RANKS):
            assert "No space left on device" in generation.said(rank)[1]
        assert not list(tmp_path.glob(".last.ckpt*")), "something was left over"


def test_no_rank_loads_what_one_rank_finds_damaged(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        start(coordinator, tmp_path, 0, "committed", "model_parallel").end()
        flip(tmp_path / "last.ckpt" / "__1_0.distcp")
        generation = start(coordinator, tmp_path, 1, "committed", "model_parallel")
        generation.end()
        for rank in range(RANKS):
            assert generation.said(rank) == []
            assert "CorruptCheckpointError" in generation.logged(rank)
            assert "last.ckpt is damaged: __1_0.distcp at offset 0: " in generation.logged(rank)


@pytest.mark.parametrize("kind", ["ddp", "model_parallel"])
def test_all_ranks_say_so_if_one_finds_no_checkpoint(tmp_path: Path, kind: str):
    """Lightning restores before the strategy is set up for one kind, and after it for the other."""
    with Coordinator(tmp_path) as coordinator:
        start(coordinator, tmp_path, 0, "committed", kind).end()
        (tmp_path / "unmounted-1").touch()
        generation = start(coordinator, tmp_path, 1, "committed", kind)
        generation.end()
        assert said(generation) == [[], []]
        assert (
            f"rank 0 has {tmp_path / 'last.ckpt'} to resume from, and another rank has none"
            in generation.logged(0)
        )
        assert "rank 1 has no checkpoint to resume from, and another rank has one" in generation.logged(1)


CASES = [
    ("model_parallel", "1", "kill", "before"),
    ("model_parallel", "1", "kill", "after"),
    ("model_parallel", "0", "kill", "writing"),
    ("model_parallel", "0", "kill", "after"),
    ("model_parallel", "1", "stop", "before"),
    ("fsdp", "1", "kill", "writing"),
    ("ddp", "0", "kill", "writing"),
    ("ddp", "0", "kill", "after"),
    ("ddp", "1", "kill", "before"),
    ("ddp", "1", "stop", "before"),
]


@pytest.mark.thorough_only
@pytest.mark.parametrize(("kind", "who", "what", "when"), CASES)
def test_lost_rank_is_named_at_every_moment_of_a_save(
    tmp_path: Path, kind: str, who: str, what: str, when: str
):
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        generation = start(coordinator, tmp_path, 0, "committed", kind, who, what, when)
        generation.end(but=int(who) if what == "stop" else -1)
        lost, left = generation.ranks[int(who)].pid, 1 - int(who)
        assert said(generation)[left][:3] == ["saved 1", "saved 2", "failed 3"], generation.logged(left)
        assert f"pid {lost}" in generation.said(left)[2]
        assert resumed(coordinator, tmp_path, kind) == FAULTY - 1


@pytest.mark.thorough_only
@pytest.mark.parametrize("when", ["writing", "after"])
def test_a_disk_that_is_full_fails_one_save_of_a_file_too(tmp_path: Path, when: str):
    with Coordinator(tmp_path) as coordinator:
        generation = start(coordinator, tmp_path, 0, "committed", "ddp", "0", "raise", when)
        generation.end()
        expected = saved(1)
        expected[FAULTY - 1] = f"failed {FAULTY}"
        assert said(generation) == [expected, expected]
        assert resumed(coordinator, tmp_path, "ddp") == SAVES


def test_lightnings_own_strategy_mixes_two_steps(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        generation = start(coordinator, tmp_path, 0, "plain", "model_parallel", "1", "kill", "writing")
        generation.end()
        generation = start(coordinator, tmp_path, 1, "plain", "model_parallel")
        generation.end()
        assert [generation.said(rank)[0] for rank in range(RANKS)] == ["resumed 3 2", "resumed 2 2"]
