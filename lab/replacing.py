"""A job under torchrun whose nodes are replaced and killed, and the judge of what its ranks trained."""

import random
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from statistics import median

from lab.patience import PATIENCE, until
from lab.processes import fork_client
from lab.processes.agents import Agent, Job
from lab.processes.fork_client import MUSTER, TORCH

PROGRAM = Path(__file__).with_name("replaced.py")
EVICTED = 75
"""The exit code of an evicted agent, as of agents of a stopped run."""


class ReplaceableJob(Job):
    """A job of which each agent has an address of its own.

    Args:
        folder: for all that its processes leave.
        endpoint: the coordinator's.
        nodes: of a round.
        restarts: how often an agent may start its workers again because one of them failed.
    """

    def __init__(self, folder: Path, endpoint: str, nodes: int, restarts: int = 1000) -> None:
        command = (str(PROGRAM), str(folder))
        super().__init__(folder, endpoint, command=command, imports=TORCH, restarts=restarts)
        self.nodes = nodes

    def start(self) -> Agent:
        """Start an agent, on a node of its own."""
        number = len(self.agents) + 1
        address = f"127.0.{number // 250}.{number % 250 + 1}"
        return self.agent(f"{self.nodes}", address=address, node=f"node-{number}", join_timeout=300)

    def in_round(self, after: int = -1) -> tuple[int, list[Agent]]:
        """Wait for a round with a number above ``after``. Returns its number and its agents, by rank."""
        workers = self.round(self.nodes, after=after)
        by_pid = {agent.process.pid: agent for agent in self.agents}
        return workers[0].round, [by_pid[worker.agent] for worker in workers]

    def trains(self, round: int, steps: int = 1) -> None:
        """Wait until all ranks of a round, or of a later one, have trained so many steps."""
        until(lambda: self._trained(round) >= steps, lambda: f"it does not train:\n{self.said()}")

    def _trained(self, least: int) -> int:
        logs = read(self.folder)
        rounds = [number for number in logs if number >= least]
        return max(
            (
                min(len(rank.trained) for rank in logs[number].values())
                for number in rounds
                if len(logs[number]) == self.nodes
            ),
            default=0,
        )


@dataclass
class RankLog:
    """The lines of one rank in one round."""

    began: int | None = None
    trained: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)


def read(folder: Path) -> dict[int, dict[int, RankLog]]:
    """Return what the ranks told, by round and rank."""
    logs: dict[int, dict[int, RankLog]] = defaultdict(dict)
    for path in sorted(folder.glob("lines-*")):
        _, round, rank = path.name.split("-")
        mine = logs[int(round)][int(rank)] = RankLog()
        text = path.read_text()
        for line in text[: text.rfind("\n") + 1].splitlines():
            what, step = line.split()
            if what == "began":
                mine.began = int(step)
            else:
                list[int].append(getattr(mine, what), int(step))
    return dict(logs)


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
            f"round {round}, rank {rank}: step {s} is wrong" for rank, log in ranks.items() for s in log.wrong
        ]
        starts = {log.began for log in ranks.values() if log.began is not None}
        if len(starts) > 1:
            wrong.append(f"round {round}: its ranks began at {sorted(starts)}")
        if starts and min(starts) < committed:
            wrong.append(f"round {round}: it began at {min(starts)}, and {committed} was committed")
        for rank, log in ranks.items():
            start = log.began or 0
            if log.trained != list(range(start + 1, start + 1 + len(log.trained))):
                wrong.append(f"round {round}, rank {rank}: its steps have a gap after {start}")
        trained = max((log.trained[-1] for log in ranks.values() if log.trained), default=0)
        again[round] = max(0, last - min(starts)) if starts else 0
        committed = max([committed, *(step for log in ranks.values() for step in log.saved)])
        last = max(last, trained)
    return Verdict(wrong, last, again)


def percentile(values: list[float], part: float = 0.99) -> float:
    """Return the least value that so large a part of the values does not exceed."""
    return sorted(values)[ceil(part * len(values)) - 1]


KINDS = ("replace",) * 10 + ("kill",) * 5 + ("replace and kill",) * 3 + ("replace twice",) * 2
"""What happens to a job, by frequency."""
WAIT = 100.0
"""Seconds that a replacement may take."""


@dataclass
class Account:
    """What happened to a job, and how long each replacement took."""

    kinds: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of ``muster replace``: until the next round was complete without the node."""
    until_training: list[float] = field(default_factory=list)
    """Until its ranks had trained a step, too."""
    kill_seconds: list[float] = field(default_factory=list)
    """From a kill of a node until the ranks of the next round had trained a step."""

    def __str__(self) -> str:
        counts = ", ".join(f"{self.kinds.count(kind)} times {kind}" for kind in dict.fromkeys(self.kinds))
        parts = {
            "muster replace": self.seconds,
            "until all train": self.until_training,
            "after a kill until all train": self.kill_seconds,
        }
        lines = [
            f"{name}: median {median(values):.1f} s, p99 {percentile(values):.1f} s"
            for name, values in parts.items()
            if values
        ]
        return "\n".join([counts, *lines])


class Replacing:
    """Replaces and kills nodes of a job at random, with one node on standby.

    Args:
        job: the job, without agents.
        seed: of the choices and moments.
    """

    def __init__(self, job: ReplaceableJob, seed: int) -> None:
        self.account = Account()
        self._job = job
        self._chance = random.Random(seed)
        for _ in range(job.nodes):
            job.start()
        self._round, self._agents = job.in_round()
        job.start()

    def events(self, count: int) -> None:
        """Let so many things happen, one after the other."""
        for _ in range(count):
            kind = self._chance.choice(KINDS)
            self.account.kinds.append(kind)
            self._job.trains(self._round, steps=self._chance.randint(1, 30))
            began = time.monotonic()
            victim = self._chance.choice(self._agents)
            gone = [victim]
            if kind == "kill":
                victim.kill()
                self._job.start()
            else:
                gone += self._replace(kind, victim)
                if kind == "replace":
                    self.account.seconds.append(time.monotonic() - began)
            self._go_on(gone)
            seconds = time.monotonic() - began
            if kind == "kill":
                self.account.kill_seconds.append(seconds)
            elif kind == "replace":
                self.account.until_training.append(seconds)

    def _replace(self, kind: str, victim: Agent) -> list[Agent]:
        """Replace a node. Returns others that have gone meanwhile."""
        commands = [self._command(victim) for _ in range(1 + (kind == "replace twice"))]
        gone = []
        if kind == "replace and kill":
            time.sleep(self._chance.uniform(0.0, 2.0))
            other = self._chance.choice(self._agents)
            other.kill()
            self._job.start()
            gone.append(other)
        for command in commands:
            said = command.communicate(timeout=PATIENCE)
            assert command.returncode == 0, f"{said}\n{self._job.said()}"
        if victim not in gone:
            code = victim.wait()
            assert code == EVICTED, f"{victim.name} ended with {code}:\n{victim.said()}"
        self._job.start()
        return gone

    def _command(self, victim: Agent) -> "subprocess.Popen[str]":
        command = [str(MUSTER), "replace", self._job.run_id, victim.node, f"--wait={WAIT}"]
        return fork_client.popen(
            [*command, f"--endpoint={self._job.endpoint}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _go_on(self, gone: list[Agent]) -> None:
        """Wait until a round trains without those that have gone."""
        while True:
            number, agents = self._job.in_round(after=self._round)
            if not set(gone) & set(agents):
                break
            self._round = number
        self._round, self._agents = number, agents
        self._job.trains(self._round)
