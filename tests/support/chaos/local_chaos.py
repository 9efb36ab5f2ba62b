"""Injects faults into a job with local checkpoints, and compares what it resumes from with a model.

Each round begins a generation, resumes, saves, and then injects some faults. Each part has one copy, so at
most one node loses its disk or has files damaged in a round. For a long run:

    python -m tests.support.chaos.local_chaos --rounds 120
"""

import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lab.processes.coordinator import Coordinator
from tests.support.chaos.harness import Chaos, command, option
from tests.support.saves.local_ranks import Node, local_job

NODES = 4
PAUSE = 1.5
"""Seconds for which a keeper is stopped."""


@dataclass
class Model:
    """The steps that the next round may resume from.

    If no node was hurt, that is the newest step. Else it is any step from the newest replicated one on.
    """

    newest: int | None = None
    """The newest step that all ranks have finalized or resumed from; None at the start."""
    copied: int | None = None
    """The newest step of this round that was finalized as replicated."""
    is_hurt: bool = False
    """Whether a node has lost its disk or had files damaged since then."""

    def saved(self, step: int, wait_for: str) -> None:
        """Note a save that all ranks have finalized."""
        self.newest = step
        if wait_for == "replicated":
            self.copied = step

    def resumed(self, heard: list[str]) -> list[str]:
        """Return what is wrong with what the ranks resumed from, and note it.

        Args:
            heard: what each rank said.
        """
        allowed: dict[str, int | None] = {
            "nothing" if step is None else f"step {step}, local": step for step in self._allowed()
        }
        if len(set(heard)) != 1:
            return [f"the ranks did not resume from the same: {heard}"]
        if heard[0] not in allowed:
            return [f"resumed from {heard[0]}, and the model allows {list(allowed)}"]
        self.newest, self.is_hurt = allowed[heard[0]], False
        # What was copied may have been on the node that was hurt: the next save makes new copies.
        self.copied = None
        return []

    def _allowed(self) -> list[int | None]:
        if not self.is_hurt:
            return [self.newest]
        assert self.copied is not None
        assert self.newest is not None
        return list(range(self.copied, self.newest + 1))


@dataclass(kw_only=True)
class LocalChaos(Chaos):
    """Inject faults into a job with local checkpoints."""

    rounds: int = option(120, "the number of generations")

    def open(self, folder: Path, stack: ExitStack) -> None:
        """Start the coordinator."""
        self.model = Model()
        self._coordinator = stack.enter_context(Coordinator(folder, session_ttl=3.0))
        self._job = stack.enter_context(local_job(folder, self._coordinator.endpoint, NODES))

    def step(self) -> bool:
        """Begin a generation, resume, save, and inject faults."""
        job = self._job
        begun = job.begin()
        assert begun == [None] * NODES, begun
        for rank in job.ranks:
            rank.tell("resume")
        self._disturb()
        self.wrong += self.model.resumed([rank.answer() for rank in job.ranks])
        if self.wrong:
            return False
        for wait_for in ["local"] * self.chance.randint(0, 1) + ["replicated"]:
            self._save(wait_for)
        if self.chance.random() < 0.4:
            self._save("local")
        job.kill()
        self._hurt()
        self.counts["rounds"] += 1
        return self.counts["rounds"] < self.rounds

    def _save(self, wait_for: str) -> None:
        self.counts["saves"] += 1
        self._job.save(self.counts["saves"], wait_for=wait_for)
        self.model.saved(self.counts["saves"], wait_for)

    # ------------------------------------------------------------------ faults

    def _disturb(self) -> None:
        """Inject a fault, or none, while the ranks resume."""
        match self.chance.choice(["nothing", "coordinator", "keeper", "stopped keeper"]):
            case "coordinator":
                self.injected["coordinator killed while it decides"] += 1
                time.sleep(self.chance.random() * 0.3)
                self._coordinator.restart()
            case "keeper":
                time.sleep(self.chance.random() * 0.3)
                self.injected["keeper killed while ranks resume"] += self._any_node().kill_keeper()
            case "stopped keeper":
                self.injected["keeper stopped while ranks resume"] += self._any_node().pause_keeper(PAUSE)

    def _hurt(self) -> None:
        """Inject faults between two generations."""
        job, random = self._job, self.chance
        victim = self._any_node()
        for fault in random.sample(
            ["wipe", "flip", "keepers", "coordinator", "shared"], random.randint(1, 3)
        ):
            match fault:
                case "wipe":
                    self.injected["node lost with its disk"] += 1
                    victim.lose()
                    self.model.is_hurt = True
                case "flip":
                    files = sorted(victim.kept.glob("*/*.distcp"))
                    chosen = [path for path in files if random.random() < 0.7]
                    for path in chosen:
                        victim.flip(path.parent.name, path.name)
                    self.injected["files flipped on a node"] += bool(chosen)
                    self.model.is_hurt |= bool(chosen)
                case "keepers":
                    for node in random.sample(job.nodes, random.randint(1, NODES)):
                        self.injected["keeper killed between generations"] += node.kill_keeper()
                case "coordinator":
                    self.injected["coordinator killed between generations"] += 1
                    self._coordinator.restart()
                case "shared":
                    # It stays away for good, so that counts once.
                    if job.shared.is_dir() or not job.shared.exists():
                        self.injected["shared storage away"] += 1
                        job.hide_shared()

    def _any_node(self) -> Node:
        return self.chance.choice(self._job.nodes)


if __name__ == "__main__":
    sys.exit(command(LocalChaos))
