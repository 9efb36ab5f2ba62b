"""A job under torchrun whose nodes are replaced and killed, and the judge of what its ranks trained."""

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from lab.patience import until
from lab.processes.agents import Agent, Job
from lab.processes.fork_client import TORCH

PROGRAM = Path(__file__).with_name("replaced.py")


class ReplaceableJob(Job):
    """A job of which each agent has an address of its own.

    Args:
        folder: for all that its processes leave.
        endpoint: the coordinator's.
        nodes: of a round.
    """

    def __init__(self, folder: Path, endpoint: str, nodes: int) -> None:
        super().__init__(folder, endpoint, command=(str(PROGRAM), str(folder)), imports=TORCH, restarts=1000)
        self.nodes = nodes

    def start(self) -> Agent:
        """Start an agent, on a node of its own."""
        number = len(self.agents) + 1
        return self.agent(
            f"{self.nodes}", address=f"127.0.{number // 250}.{number % 250 + 1}", join_timeout=300
        )

    def in_round(self, after: int = -1) -> tuple[int, list[Agent]]:
        """Wait for a round with a number above ``after``. Returns its number and its agents, by rank."""
        workers = self.round(self.nodes, after=after)
        by_pid = {agent.process.pid: agent for agent in self.agents}
        return workers[0].round, [by_pid[worker.agent] for worker in workers]

    def trains(self, round: int, steps: int = 1) -> None:
        """Wait until all ranks of a round, or of a later one, have trained so many steps."""
        until(lambda: self._trained(round) >= steps, lambda: f"it does not train:\n{self.said()}")

    def _trained(self, least: int) -> int:
        told = read(self.folder)
        rounds = [number for number in told if number >= least]
        return max(
            (
                min(len(rank.trained) for rank in told[number].values())
                for number in rounds
                if len(told[number]) == self.nodes
            ),
            default=0,
        )


@dataclass
class Told:
    """The lines of one rank in one round."""

    began: int | None = None
    trained: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)


def read(folder: Path) -> dict[int, dict[int, Told]]:
    """Return what the ranks told, by round and rank."""
    told: dict[int, dict[int, Told]] = defaultdict(dict)
    for path in sorted(folder.glob("lines-*")):
        _, round, rank = path.name.split("-")
        mine = told[int(round)][int(rank)] = Told()
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            what, step = line.split()
            if what == "began":
                mine.began = int(step)
            else:
                list[int].append(getattr(mine, what), int(step))
    return dict(told)


@dataclass
class Verdict:
    """What became of a job."""

    wrong: list[str]
    """What must not be; empty: nothing."""
    steps: int
    """The last step that was trained."""
    again: dict[int, int]
    """By round: how many steps were trained again that an earlier round had trained."""


def judge(folder: Path) -> Verdict:
    """Hold what the ranks told against each other, round by round."""
    wrong: list[str] = []
    again: dict[int, int] = {}
    last = committed = 0
    for round, ranks in sorted(read(folder).items()):
        wrong += [
            f"round {round}, rank {rank}: step {s} is wrong"
            for rank, told in ranks.items()
            for s in told.wrong
        ]
        starts = {told.began for told in ranks.values() if told.began is not None}
        if len(starts) > 1:
            wrong.append(f"round {round}: its ranks began at {sorted(starts)}")
        if starts and min(starts) < committed:
            wrong.append(f"round {round}: it began at {min(starts)}, and {committed} was committed")
        for rank, told in ranks.items():
            start = told.began or 0
            if told.trained != list(range(start + 1, start + 1 + len(told.trained))):
                wrong.append(f"round {round}, rank {rank}: its steps have a gap after {start}")
        trained = max((told.trained[-1] for told in ranks.values() if told.trained), default=0)
        again[round] = max(0, last - min(starts)) if starts else 0
        committed = max([committed, *(step for told in ranks.values() for step in told.saved)])
        last = max(last, trained)
    return Verdict(wrong, last, again)
