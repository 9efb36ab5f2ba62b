"""Jobs that save with ``torch.distributed.checkpoint`` while ranks fail: with Muster's writer, or without."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.coordinator import Coordinator, free_port
from tests.support.dcp_job import FAULTY, SAVES
from tests.support.patience import PATIENCE, until

PROGRAM = Path(__file__).parent.parent / "support" / "dcp_job.py"
RANKS = 2


class Life:
    """One life of a job: its ranks, until they have ended."""

    def __init__(self, coordinator: Coordinator, folder: Path, number: int, *arguments: str) -> None:
        self.folder = folder / f"life-{number}"
        self.folder.mkdir()
        environment = os.environ | {
            "MUSTER_ENDPOINT": coordinator.endpoint,
            "MUSTER_RUN_ID": "job",
            "TORCHELASTIC_RESTART_COUNT": str(number),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(RANKS),
            "OMP_NUM_THREADS": "1",
        }
        self.ranks = []
        for rank in range(RANKS):
            with (
                (self.folder / f"rank-{rank}").open("w") as out,
                (self.folder / f"log-{rank}").open("w") as log,
            ):
                command = [sys.executable, str(PROGRAM), str(folder / "last"), *arguments]
                environment["RANK"] = str(rank)
                self.ranks.append(subprocess.Popen(command, env=environment, stdout=out, stderr=log))

    def end(self, *, but: int = -1) -> None:
        """Wait until its ranks have ended, but for one that is killed then."""
        for rank, process in enumerate(self.ranks):
            if rank != but:
                process.wait(PATIENCE)
        if but >= 0:
            self.ranks[but].kill()
            self.ranks[but].wait()

    def speaks(self) -> None:
        """Wait for its first word."""
        until(lambda: self.said(0), lambda: self.logged(0))

    def said(self, rank: int) -> list[str]:
        return (self.folder / f"rank-{rank}").read_text().splitlines()

    def logged(self, rank: int) -> str:
        return (self.folder / f"log-{rank}").read_text()


def resumed(coordinator: Coordinator, folder: Path, mode: str) -> list[str]:
    """What the ranks of the next life say first."""
    life = Life(coordinator, folder, 1, mode)
    life.end()
    said = [life.said(rank) for rank in range(RANKS)]
    for lines in said:
        assert lines[-1] == f"saved {int(lines[0].split()[1]) + SAVES}", said
    return [lines[0] for lines in said]


@pytest.mark.parametrize("when", ["before", "planning", "writing", "after"])
def test_a_rank_that_is_killed_is_named_and_what_was_saved_before_is_resumed(tmp_path: Path, when: str):
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        life = Life(coordinator, tmp_path, 0, "committed", "1", "kill", when)
        life.end()
        assert life.said(0)[:2] == ["saved 1", "saved 2"]
        assert "rank 1 (" in life.logged(0)
        assert f"pid {life.ranks[1].pid}" in life.logged(0)
        assert resumed(coordinator, tmp_path, "committed") == [f"resumed {FAULTY - 1}"] * RANKS
        assert not list(tmp_path.glob(".last*")), "something was left over"


@pytest.mark.parametrize("when", ["planning", "writing", "after"])
def test_a_rank_that_raises_fails_one_save_of_all_and_the_next_one_commits(tmp_path: Path, when: str):
    with Coordinator(tmp_path) as coordinator:
        life = Life(coordinator, tmp_path, 0, "committed", "1", "raise", when)
        life.end()
        for rank in range(RANKS):
            said = life.said(rank)
            assert [line.split()[:2] for line in said] == [
                ["failed" if step == FAULTY else "saved", str(step)] for step in range(1, SAVES + 1)
            ], said
            assert "No space left on device" in said[FAULTY - 1]
        assert resumed(coordinator, tmp_path, "committed") == [f"resumed {SAVES}"] * RANKS


def test_who_hangs_in_a_collective_hears_who_has_not_come(tmp_path: Path):
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        life = Life(coordinator, tmp_path, 0, "committed", "1", "stop", "before")
        life.end(but=1)
        assert "rank 1 (" in life.logged(0)
        assert resumed(coordinator, tmp_path, "committed") == [f"resumed {FAULTY - 1}"] * RANKS


def test_the_coordinator_may_be_killed_meanwhile(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        life = Life(coordinator, tmp_path, 0, "committed")
        coordinator.kill()
        coordinator.start()
        life.end()
        assert [life.said(rank)[-1] for rank in range(RANKS)] == [f"saved {SAVES}"] * RANKS


def test_whenever_a_rank_is_killed_all_resume_from_the_same_step(tmp_path: Path, thorough: bool):
    chance = random.Random(15)
    lives, saves, at = 40 if thorough else 3, 0, 0
    with Coordinator(tmp_path, session_ttl=2.0) as coordinator:
        for number in range(lives):
            life = Life(coordinator, tmp_path, number, "committed")
            life.speaks()
            time.sleep(chance.uniform(0.0, 0.3))  # Into one of its saves.
            life.ranks[chance.randrange(RANKS)].kill()
            life.end()
            said = [life.said(rank) for rank in range(RANKS)]
            if number > 0:
                first = {lines[0] for lines in said if lines}
                assert len(first) == 1, said
                resumed_at = int(first.pop().split()[1])
                assert resumed_at in (at, at + 1), f"resumed at {resumed_at}, and {at} was committed"
                at = resumed_at
            committed = [int(line.split()[1]) for lines in said for line in lines if line.startswith("saved")]
            saves += len(set(committed))
            at = max(committed, default=at)
    print(f"{saves} saves in {lives} lives, each of which lost a rank")
    assert saves


def test_torchs_own_writer_mixes_two_steps(tmp_path: Path):
    with Coordinator(tmp_path) as coordinator:
        life = Life(coordinator, tmp_path, 0, "plain", "1", "kill", "writing")
        life.end()
        assert resumed(coordinator, tmp_path, "plain") == [f"resumed {FAULTY}", f"resumed {FAULTY - 1}"]
