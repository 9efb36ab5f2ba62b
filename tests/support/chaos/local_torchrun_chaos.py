"""Injects faults into a job under torchrun with local checkpoints, and judges what it resumes from.

Nodes are agents of torchrun with a disk and a keeper each. Faults come at any moment of training and saving,
and further ones while the ranks resume. For a long run:

    python -m tests.support.chaos.local_torchrun_chaos --faults 300
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from lab.processes.agents import Agent, Job
from lab.processes.coordinator import Coordinator
from tests.support.chaos.harness import Chaos, command, option
from tests.support.chaos.local_chaos import PAUSE
from tests.support.chaos.save_chaos import Wire
from tests.support.saves.local_ranks import RUN, Node
from tests.support.saves.save_history import Event


@dataclass
class Model:
    """What the ranks may resume from, by what they have seen so far.

    If no node lost its files, that is the newest step that was finalized anywhere, or a later one: it may
    have been decided without being heard. Otherwise it is a step from the newest replicated one on.

    Args:
        ranks: how many there are.
    """

    ranks: int
    round: int = -1
    resumed: dict[int, int] = field(default_factory=dict)
    """By rank of this round: the step."""
    rounds: dict[int, int] = field(default_factory=lambda: {0: 0})
    """By step that may be resumed from: the last round in which a save of it was begun."""
    finalized: int = 0
    """The newest step that a rank has finalized since the ranks resumed, or the one they resumed from."""
    copied: dict[int, int] = field(default_factory=dict)
    """By rank of this round: the newest step that it finalized as replicated."""
    replicated: int = 0
    """The newest step that any rank has finalized as replicated."""
    _hurt_in: int | None = None
    """The round in which nodes lost files that have not been copied again since; None: no node has."""
    _lowest: int = 0
    """The oldest step that the ranks of this round may resume from."""

    @property
    def is_copied(self) -> bool:
        """Whether all ranks of a round have a step that is replicated, so that nodes may be hurt."""
        return len(self.copied) == self.ranks and (self._hurt_in is None or self._hurt_in < self.round)

    def hurt(self) -> None:
        """Note that nodes lose their files, or that files are damaged."""
        self._hurt_in = self.round

    def see(self, event: Event) -> list[str]:
        """Return what is wrong with what a rank has seen, and note it."""
        if event.round > self.round:
            self._lowest = self.finalized if self._hurt_in is None else self.replicated
            self.round, self.resumed, self.copied = event.round, {}, {}
        match event.what:
            case "scheduled":
                self.rounds[event.step] = event.round
            case "finalized":
                self.finalized = max(self.finalized, event.step)
                if event.text == "replicated":
                    self.copied[event.rank] = event.step
                    self.replicated = max(self.replicated, event.step)
                    if self.is_copied:
                        self._hurt_in = None
            case "resumed":
                return self._resume(event)
            case "wrong":
                return [
                    f"rank {event.rank} resumed from step {event.step} in round {event.round}: {event.text}"
                ]
        return []

    def _resume(self, event: Event) -> list[str]:
        wrong = []
        step, who = event.step, f"rank {event.rank} of round {event.round}"
        if set(self.resumed.values()) - {step}:
            wrong.append(f"{who} resumed from step {step}, and others from {self.resumed}")
        if step < self._lowest or step not in self.rounds:
            steps = [one for one in self.rounds if one >= self._lowest]
            wrong.append(f"{who} resumed from step {step}, and the model allows {steps}")
        elif int(event.path) != self.rounds[step]:
            wrong.append(f"{who} resumed from step {step} of round {event.path}, not {self.rounds[step]}")
        if event.text != "local":
            wrong.append(f"{who} resumed from {event.text} storage")
        self.resumed[event.rank] = self.finalized = step
        # What is newer is abandoned, and must not come back with a disk that was away.
        self.rounds = {one: round for one, round in self.rounds.items() if one <= step}
        return wrong


@dataclass(kw_only=True)
class LocalTorchrunChaos(Chaos):
    """Inject faults into a job under torchrun with local checkpoints."""

    faults: int = option(300, "the number of faults")
    nodes: int = option(4, "the number of nodes")
    replicas: int = option(1, "the copies of each part, and the nodes that are lost at once")

    def open(self, folder: Path, stack: ExitStack) -> None:
        """Start the coordinator and the nodes."""
        self._folder = folder
        self.model = Model(self.nodes)
        self._coordinator = stack.enter_context(Coordinator(folder, session_ttl=3.0))
        rank = ("--module", "tests.support.chaos.local_chaos_rank", str(folder), str(self.replicas))
        self._job = stack.enter_context(
            Job(folder, self._coordinator.endpoint, RUN, command=rank, restarts=10 * self.faults)
        )
        stack.callback(self._end_keepers)
        self._wire = stack.enter_context(Wire(folder / "events"))
        self._news = self._wire.events()
        self._disks = 0
        self._shelf: list[str] = []
        """Nodes that were replaced, and may come back with their old files."""
        self._agents = [self._start(self._new_name()) for _ in range(self.nodes)]

    def step(self) -> bool:
        """Let all ranks resume and make copies, then train for a while, and inject a fault."""
        while not self.wrong and not self.model.is_copied:
            self._see()
        for _ in range(self.chance.randint(0, 8 * self.nodes)):
            self._see()
        while not self._wire.is_quiet():
            self._see()
        if self.wrong or self.injected.total() >= self.faults:
            return False
        # A fault may have begun a round meanwhile.
        if self.model.is_copied:
            time.sleep(self.chance.uniform(0.0, 0.05))
            self.chance.choice(self._faults())()
        return True

    def judge(self) -> None:
        """Let the ranks finish."""
        if not self.wrong:
            self._job.finish()
            codes = [agent.wait() for agent in self._agents]
            assert codes == [0] * self.nodes, self._job.said()
        self.counts["rounds"] = self.model.round + 1
        self.counts["steps"] = max(self.model.rounds)

    def stacks(self) -> str:
        """Return what the agents said."""
        return self._job.said()

    def _see(self) -> None:
        event = next(self._news)
        self.counts["resumed ranks"] += event.what == "resumed"
        if event.what in ("finalized", "failed") and event.rank == 0:
            self.counts[f"saves {event.what}"] += 1
        self.wrong += self.model.see(event)

    # ------------------------------------------------------------------ nodes

    def _new_name(self) -> str:
        self._disks += 1
        return f"node-{self._disks}"

    def _start(self, name: str) -> Agent:
        return self._job.agent(
            str(self.nodes), node=name, address=f"127.0.0.{int(name.split('-')[1]) % 250 + 1}"
        )

    def _node(self, agent: Agent) -> Node:
        return Node(self._folder / agent.node)

    def _end_keepers(self) -> None:
        for number in range(1, self._disks + 1):
            Node(self._folder / f"node-{number}").kill_keeper()

    def _kill(self, agent: Agent) -> None:
        """Kill all processes of a node."""
        agent.kill()
        self._node(agent).kill_keeper()

    def _recover(self, *nodes: tuple[Agent, str]) -> None:
        """Let nodes take the places of those that were killed, and perhaps inject a further fault meanwhile.

        Args:
            nodes: each agent that was killed, and the name of the node that takes its place.
        """
        is_early = self.chance.random() < 0.5
        if is_early:
            self._disturb(1.5)
        for agent, name in nodes:
            self._agents[self._agents.index(agent)] = self._start(name)
        if not is_early:
            self._disturb(3.0)

    def _disturb(self, most: float) -> None:
        """Wait, then inject a further fault, or none, while others notice, meet, or resume.

        Args:
            most: seconds.
        """
        time.sleep(self.chance.uniform(0.0, most))
        if self.chance.random() < 0.6:
            self.chance.choice((self._kill_coordinator, self._kill_keepers, self._stop_keeper))()

    # ------------------------------------------------------------------ faults

    def _faults(self) -> tuple[Callable[[], None], ...]:
        return (
            self._lose,
            self._lose,
            self._replace,
            self._reboot,
            self._flip,
            self._kill_rank,
            self._kill_keepers,
            self._stop_keeper,
            self._kill_coordinator,
            self._take_shared_away,
        )

    def _victims(self) -> list[Agent]:
        return self.chance.sample(self._agents, self.chance.randint(1, self.replicas))

    def _lose(self) -> None:
        """Lose nodes with their disks; new nodes come."""
        victims = self._victims()
        self.model.hurt()
        for agent in victims:
            self._kill(agent)
            self._node(agent).lose()
        self.injected["node lost with its disk"] += len(victims)
        self._recover(*((agent, self._new_name()) for agent in victims))

    def _replace(self) -> None:
        """Replace a node, perhaps by one that was replaced before and has old files."""
        agent = self.chance.choice(self._agents)
        self.model.hurt()
        self._kill(agent)
        is_stale = bool(self._shelf) and self.chance.random() < 0.7
        name = self._shelf.pop(0) if is_stale else self._new_name()
        self._shelf.append(agent.node)
        self.injected["node replaced by one with old files" if is_stale else "node replaced"] += 1
        self._recover((agent, name))

    def _reboot(self) -> None:
        """Kill some or all nodes, which come back with their disks."""
        victims = self.chance.sample(self._agents, self.chance.randint(1, self.nodes))
        for agent in victims:
            self._kill(agent)
        self.injected["nodes rebooted"] += 1
        self._recover(*((agent, agent.node) for agent in victims))

    def _flip(self) -> None:
        """Reboot nodes, some files of which were damaged."""
        victims = self._victims()
        self.model.hurt()
        for agent in victims:
            self._kill(agent)
            node = self._node(agent)
            for path in sorted(node.kept.glob("*/*.distcp")):
                if self.chance.random() < 0.7:
                    node.flip(path.parent.name, path.name)
        self.injected["files of a node damaged"] += len(victims)
        self._recover(*((agent, agent.node) for agent in victims))

    def _kill_rank(self) -> None:
        """Kill a rank; its agent lives."""
        workers = [one for one in self._job.workers() if one.round == self.model.round]
        if workers:
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(workers).pid, signal.SIGKILL)
                self.injected["rank killed"] += 1
            self._disturb(3.0)

    def _kill_keepers(self) -> None:
        """Kill some keepers."""
        victims = self.chance.sample(self._agents, self.chance.randint(1, self.nodes))
        hit = [self._node(agent).kill_keeper() for agent in victims]
        self.injected["keepers killed"] += any(hit)

    def _stop_keeper(self) -> None:
        """Stop a keeper for a while."""
        node = self._node(self.chance.choice(self._agents))
        self.injected["keeper stopped"] += node.pause_keeper(PAUSE)

    def _kill_coordinator(self) -> None:
        """Kill the coordinator, and start it again."""
        self._coordinator.kill()
        time.sleep(self.chance.uniform(0.0, 0.3))
        self._coordinator.start()
        self.injected["coordinator killed"] += 1

    def _take_shared_away(self) -> None:
        """Take shared storage away, or bring it back."""
        shared, hidden = self._folder / "shared", self._folder / "hidden"
        if hidden.exists():
            shared.unlink()
            hidden.rename(shared)
        elif shared.is_dir():
            shared.rename(hidden)
            shared.write_text("not a folder")
            self.injected["shared storage away"] += 1


if __name__ == "__main__":
    sys.exit(command(LocalTorchrunChaos))
