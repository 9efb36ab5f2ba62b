"""Jobs that save with ``torch.distributed.checkpoint`` while ranks fail: with Muster's writer, or without."""

from pathlib import Path

import pytest

from lab.patience import PATIENCE
from lab.processes.command import output
from lab.processes.coordinator import Coordinator
from muster.checkpoint.damage import DAMAGED
from tests.support.jobs.fault import FAULTY, SAVES
from tests.support.jobs.generations import RANKS, JobGeneration
from tests.support.saves.damage import flip


def start(coordinator: Coordinator, folder: Path, number: int, *arguments: str) -> JobGeneration:
    return JobGeneration(coordinator, "dcp_job", folder, number, str(folder / "last"), *arguments)


def resumed(coordinator: Coordinator, folder: Path, mode: str) -> list[str]:
    """What the ranks of the next generation say first."""
    generation = start(coordinator, folder, 1, mode)
    generation.end()
    said = [generation.said(rank) for rank in range(RANKS)]
    for lines in said:
        assert lines[-1] == f"saved {int(lines[0].split()[1]) + SAVES}", said
    return [lines[0] for lines in said]


def failed_saves(described: str) -> tuple[str, list[str]]:
    """The table of failed saves in what ``describe run`` says: its head, and its rows."""
    table = described.split("Failed saves:\n")[1].split("\n\n")[0]
    head, *rows = table.splitlines()
    return head, rows


@pytest.mark.parametrize("when", ["before", "planning", "writing", "after"])
def test_killed_rank_is_named_and_the_previous_save_is_resumed(tmp_path: Path, when: str):
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        generation = start(coordinator, tmp_path, 0, "committed", "1", "kill", when)
        generation.end()
        assert generation.said(0)[:2] == ["saved 1", "saved 2"]
        assert "rank 1 (" in generation.logged(0)
        assert f"pid {generation.ranks[1].pid}" in generation.logged(0)
        assert resumed(coordinator, tmp_path, "committed") == [f"resumed {FAULTY - 1}"] * RANKS
        assert not list(tmp_path.glob(".last*")), "something was left over"


@pytest.mark.parametrize("when", ["planning", "writing", "after"])
def test_a_rank_that_raises_fails_one_save_of_all_and_the_next_one_commits(tmp_path: Path, when: str):
    with Coordinator(tmp_path) as coordinator:
        generation = start(coordinator, tmp_path, 0, "committed", "1", "raise", when)
        generation.end()
        for rank in range(RANKS):
            said = generation.said(rank)
            assert [line.split()[:2] for line in said] == [
                ["failed" if step == FAULTY else "saved", str(step)] for step in range(1, SAVES + 1)
            ], said
            assert "No space left on device" in said[FAULTY - 1]
        described = output(coordinator.endpoint, "describe", "run", "job")
        assert f"; {SAVES - 1} so far" in described
        _, (failed,) = failed_saves(described)
        # A rank that fails while all plan in a collective ends that of the others, too.
        assert "No space left on device" in failed or (when == "planning" and "was given up by" in failed)
        assert resumed(coordinator, tmp_path, "committed") == [f"resumed {SAVES}"] * RANKS


def test_rank_in_a_hanging_collective_learns_the_missing_rank(tmp_path: Path):
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        generation = start(coordinator, tmp_path, 0, "committed", "1", "stop", "before")
        generation.end(but=1)
        assert "rank 1 (" in generation.logged(0)
        assert resumed(coordinator, tmp_path, "committed") == [f"resumed {FAULTY - 1}"] * RANKS


def test_the_coordinator_may_be_killed_meanwhile(tmp_path: Path):
    with Coordinator(tmp_path, session_ttl=PATIENCE) as coordinator:
        generation = start(coordinator, tmp_path, 0, "committed")
        generation.wait_for_output()
        coordinator.kill()  # In the midst of its saves.
        coordinator.start()
        generation.end()
        assert [generation.said(rank)[-1] for rank in range(RANKS)] == [f"saved {SAVES}"] * RANKS


def test_no_rank_loads_what_one_rank_finds_damaged(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        start(coordinator, tmp_path, 0, "committed").end()
        flip(tmp_path / "last" / "__1_0.distcp")
        generation = start(coordinator, tmp_path, 1, "committed")
        generation.end()
        for rank in range(RANKS):
            assert generation.said(rank) == []
            assert "last is damaged: __1_0.distcp at offset" in generation.logged(rank)
            assert "(found by rank 1 on " in generation.logged(rank)
        assert (tmp_path / "last" / DAMAGED).exists()


def test_torchs_own_writer_mixes_two_steps(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        generation = start(coordinator, tmp_path, 0, "plain", "1", "kill", "writing")
        generation.end()
        assert resumed(coordinator, tmp_path, "plain") == [f"resumed {FAULTY}", f"resumed {FAULTY - 1}"]
