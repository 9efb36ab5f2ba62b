"""Jobs that save on and on through a framework's adapter, of which ranks are killed, again and again."""

import random
import time
from dataclasses import dataclass
from pathlib import Path

from lab.patience import until
from lab.processes.coordinator import Coordinator
from tests.support.jobs.lives import RANKS, Life

WORDS = ("resumed", "mixed", "saved", "failed")
"""How the lines begin that a rank says; the frameworks say others."""
EACH = (5, 10)
"""How many saves a life has made, at least and at most, when one of its ranks is killed."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is run, and killed."""

    program: str
    """What the ranks run: a module of ``tests.support``."""
    arguments: tuple[str, ...]
    """The program's, after the folder."""
    early: int = 0
    """How many saves it says at most that are not committed yet."""


@dataclass
class Tally:
    """What came of a job. Its saves are those of the steps from 1 on, each of one step."""

    at: int = 0
    """The step of the last checkpoint that is known: so many were committed."""
    kills: int = 0
    resumes: int = 0
    unheard: int = 0
    """Resumes from a checkpoint that nobody had lived to hear of."""

    def __str__(self) -> str:
        return (
            f"{self.at} saves committed, {self.kills} kills, {self.resumes} resumes, {self.unheard} of them "
            "from a checkpoint that nobody had lived to hear of"
        )


def through_random_kills(coordinator: Coordinator, folder: Path, job: Job, saves: int, seed: int) -> Tally:
    """Let a job save, kill a rank of it, start it again, and see what it resumes from.

    Args:
        coordinator: the job's.
        folder: where it keeps what it has.
        job: what is run.
        saves: that are to be committed, at least. For ten of them a rank is killed, or more often.
        seed: of the moments and of the ranks that are killed.
    """
    chance = random.Random(seed)
    tally = Tally()
    while tally.at < saves or tally.kills < max(2, saves // EACH[1]):
        life = Life(coordinator, job.program, folder, tally.kills, str(folder / "out"), *job.arguments)
        try:
            _strike(life, min(chance.randint(*EACH), saves), chance)
        finally:
            for process in life.ranks:
                process.kill()
        _judge(life, job, tally)
    return tally


def _strike(life: Life, after: int, chance: random.Random) -> None:
    """Kill a rank at any moment of its saves, and see the others end."""
    until(lambda: _saved(life), lambda: _logged(life))
    first, began = len(_saved(life)), time.monotonic()
    until(lambda: len(_saved(life)) > max(first, after), lambda: _logged(life))
    one = (time.monotonic() - began) / (len(_saved(life)) - first)
    time.sleep(chance.uniform(0.0, 2 * one))  # Into one of its saves, or between two.
    life.ranks[chance.randrange(RANKS)].kill()
    life.end()


def _judge(life: Life, job: Job, tally: Tally) -> None:
    if tally.kills:
        resumed = _resumed(life)
        assert tally.at - job.early <= resumed <= tally.at + 1, f"{resumed}, and {tally.at} was committed"
        tally.resumes += 1
        tally.unheard += resumed > tally.at
        tally.at = resumed
    saved = _saved(life)
    assert saved == list(range(tally.at + 1, tally.at + 1 + len(saved))), f"{saved} after {tally.at}"
    tally.at = saved[-1]
    tally.kills += 1


def _resumed(life: Life) -> int:
    """The one step that all ranks have resumed from, all parts of it."""
    starts = {line for rank in range(RANKS) for line in _said(life, rank) if line.startswith("resumed")}
    assert len(starts) == 1, f"the ranks have not resumed from the same: {starts}"
    steps = {int(word) for word in starts.pop().split()[1:] if word != "whole"}
    assert len(steps) == 1, f"they have resumed from a mixture of the steps {steps}"
    return steps.pop()


def _saved(life: Life) -> list[int]:
    """The steps that ranks have heard of as saved."""
    lines = {line for rank in range(RANKS) for line in _said(life, rank)}
    assert not any(line.startswith("mixed") for line in lines), lines
    return sorted(int(line.split()[1]) for line in lines if line.startswith("saved"))


def _said(life: Life, rank: int) -> list[str]:
    """A rank's whole lines."""
    text = (life.folder / f"rank-{rank}").read_text()
    return [line for line in text[: text.rfind("\n") + 1].splitlines() if line.startswith(WORDS)]


def _logged(life: Life) -> str:
    return "\n".join(life.logged(rank) for rank in range(RANKS))
