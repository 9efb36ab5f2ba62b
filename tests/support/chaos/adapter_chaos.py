"""Jobs that save on and on through a framework's adapter, of which ranks are killed, again and again.

For a long run: ``python -m tests.support.chaos.adapter_chaos --program dcp_job --arguments endless``.
"""

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lab.patience import until
from lab.processes.coordinator import Coordinator
from tests.support.chaos.harness import Chaos, command, option
from tests.support.jobs.generations import RANKS, JobGeneration

WORDS = ("resumed", "mixed", "saved", "failed")
"""How the lines begin that a rank says; the frameworks say others."""
EACH = (5, 10)
"""How many saves a generation has made, at least and at most, when one of its ranks is killed."""


@dataclass
class Committed:
    """What is known to be committed, by which each generation of a job is judged.

    The saves are those of the steps from 1 on, each of one step.
    """

    early: int = 0
    """The number of saves, at most, that a rank tells before they are committed."""
    at: int = 0
    """The step of the last checkpoint that is known: so many were committed."""
    resumes: int = 0
    unheard: int = 0
    """Resumes from a checkpoint that nobody had lived to hear of."""
    generations: int = 0

    def judge(self, said: list[list[str]]) -> list[str]:
        """Return what is wrong with a generation, and take what it has committed into account.

        Args:
            said: the lines of each rank.
        """
        lines = {line for rank in said for line in rank}
        wrong = [line for line in lines if line.startswith("mixed")]
        if self.generations:
            wrong += self._judge_resumption({line for line in lines if line.startswith("resumed")})
        saved = saves_in(said)
        if saved != list(range(self.at + 1, self.at + 1 + len(saved))):
            wrong.append(f"the steps {saved} were saved after {self.at}")
        self.at = max([self.at, *saved])
        self.generations += 1
        return wrong

    def _judge_resumption(self, starts: set[str]) -> list[str]:
        """All ranks must resume from all parts of one step, the last that was committed."""
        steps = {int(word) for line in starts for word in line.split()[1:] if word != "whole"}
        if len(starts) != 1 or len(steps) != 1:
            return [f"the ranks have not resumed from one and the same step: {sorted(starts)}"]
        resumed = steps.pop()
        if not self.at - self.early <= resumed <= self.at + 1:
            return [f"the ranks resumed from {resumed}, and {self.at} was committed"]
        self.resumes += 1
        self.unheard += resumed > self.at
        self.at = resumed
        return []


def saves_in(said: list[list[str]]) -> list[int]:
    """Return the steps that ranks have heard of as saved."""
    lines = {line for rank in said for line in rank}
    return sorted(int(line.split()[1]) for line in lines if line.startswith("saved"))


@dataclass(kw_only=True)
class AdapterChaos(Chaos):
    """Let a job save, kill a rank of it, start it again, and see what it resumes from."""

    program: str = option("dcp_job", "what the ranks run: a module of tests.support.jobs")
    arguments: tuple[str, ...] = option(("endless",), "the program's, after the folder")
    early: int = option(0, "the number of saves, at most, that it tells before they are committed")
    saves: int = option(
        50, "the number to be committed, at least; a rank is killed once for ten, or more often"
    )

    def open(self, folder: Path, stack: ExitStack) -> None:
        """Start the coordinator."""
        self._folder = folder
        self._coordinator = stack.enter_context(Coordinator(folder, session_ttl=2.0))
        self.committed = Committed(self.early)

    def step(self) -> bool:
        """Let the job live once."""
        generation = JobGeneration(
            self._coordinator,
            self.program,
            self._folder,
            self.committed.generations,
            str(self._folder / "out"),
            *self.arguments,
        )
        try:
            self._strike(generation)
        finally:
            for process in generation.ranks:
                process.kill()
        self.wrong += self.committed.judge(_said(generation))
        enough = self.committed.at >= self.saves and self.injected.total() >= max(2, self.saves // EACH[1])
        return not (self.wrong or enough)

    def _strike(self, generation: JobGeneration) -> None:
        """Kill a rank at any moment of its saves, and see the others end."""
        after = min(self.chance.randint(*EACH), self.saves)
        first, began = self._wait_for(generation, 1), time.monotonic()
        last = self._wait_for(generation, max(first, after) + 1)
        one = (time.monotonic() - began) / (last - first)
        time.sleep(self.chance.uniform(0.0, 2 * one))  # Into one of its saves, or between two.
        generation.ranks[self.chance.randrange(RANKS)].kill()
        self.injected["rank killed"] += 1
        generation.end()

    def _wait_for(self, generation: JobGeneration, saves: int) -> int:
        """Wait for a number of saves, and return how many there are."""
        until(
            lambda: len(saves_in(_said(generation))) >= saves,
            lambda: "\n".join(generation.logged(rank) for rank in range(RANKS)),
        )
        return len(saves_in(_said(generation)))

    def facts(self) -> list[str]:
        """Return how the job resumed."""
        return [
            f"{self.committed.at} saves committed, {self.committed.resumes} resumes, "
            f"{self.committed.unheard} of them from a checkpoint that nobody had lived to hear of"
        ]


def _said(generation: JobGeneration) -> list[list[str]]:
    """The whole lines of each rank."""
    return [_whole_lines((generation.folder / f"rank-{rank}").read_text()) for rank in range(RANKS)]


def _whole_lines(text: str) -> list[str]:
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [line for line in lines if line.startswith(WORDS)]


if __name__ == "__main__":
    sys.exit(command(AdapterChaos))
