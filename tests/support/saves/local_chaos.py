"""Injects faults into a job with local checkpoints, and compares what it resumes from with a model.

``python -m tests.support.saves.local_chaos --rounds 120`` runs many rounds, and prints what it did.

Each round begins a generation, resumes, saves, and then injects some faults. Each part has one copy, so at
most one node loses its disk or has files damaged in a round. So a plain model knows the steps that the next
round may resume from. If no node was hurt, that is the newest step. Else it is any step from the newest
replicated one on. A fault counts only if it did something.
"""

import argparse
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from lab.processes.coordinator import Coordinator
from tests.support.saves.local_ranks import LocalJob, Node, local_job

NODES = 4
PAUSE = 1.5
"""Seconds for which a keeper is stopped."""


@dataclass
class Chaos:
    """A job, its faults, and the model.

    Args:
        job: the job.
        coordinator: its coordinator.
        random: chooses the faults.
    """

    job: LocalJob
    coordinator: Coordinator
    random: Random
    faults: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    """The number of saves in all rounds, which is also the newest step."""
    newest: int | None = None
    """The newest step that all ranks have finalized or resumed from; None at the start."""
    copied: int | None = None
    """The newest step of this round that was finalized as replicated."""
    is_hurt: bool = False
    """Whether a node has lost its disk or had files damaged since then."""

    def round(self) -> None:
        """Begin a generation, resume, save, and inject faults."""
        job = self.job
        begun = job.begin()
        assert begun == [None] * NODES, begun
        allowed = self._allowed()
        for rank in job.ranks:
            rank.tell("resume")
        self._disturb()
        heard = [rank.answer() for rank in job.ranks]
        assert len(set(heard)) == 1, heard
        expected = ["nothing" if one is None else f"step {one}, local" for one in allowed]
        assert heard[0] in expected, f"resumed from {heard[0]}, and the model allows {expected}"
        step = allowed[expected.index(heard[0])]
        self.newest, self.is_hurt = step, False
        # What was copied may have been on the node that was hurt: the next save makes new copies.
        self.copied = None
        self._save()
        job.kill()
        self._hurt()

    def _allowed(self) -> list[int | None]:
        if not self.is_hurt:
            return [self.newest]
        assert self.copied is not None
        assert self.newest is not None
        return list(range(self.copied, self.newest + 1))

    def _save(self) -> None:
        for wait_for in ["local"] * self.random.randint(0, 1) + ["replicated"]:
            self._save_one(wait_for)
        if self.random.random() < 0.4:
            self._save_one("local")

    def _save_one(self, wait_for: str) -> None:
        self.steps += 1
        self.job.save(self.steps, wait_for=wait_for)
        self.newest = self.steps
        if wait_for == "replicated":
            self.copied = self.steps

    # ------------------------------------------------------------------ faults

    def _disturb(self) -> None:
        """Inject a fault, or none, while the ranks resume."""
        match self.random.choice(["nothing", "coordinator", "keeper", "stopped keeper"]):
            case "coordinator":
                self.faults["coordinator killed while it decides"] += 1
                time.sleep(self.random.random() * 0.3)
                self.coordinator.kill()
                self.coordinator.start()
            case "keeper":
                time.sleep(self.random.random() * 0.3)
                self.faults["keeper killed while ranks resume"] += self._any_node().kill_keeper()
            case "stopped keeper":
                pid = self._any_node().keeper
                if pid is not None:
                    self.faults["keeper stopped while ranks resume"] += 1
                    os.kill(pid, signal.SIGSTOP)
                    threading.Timer(PAUSE, lambda: _continue(pid)).start()

    def _hurt(self) -> None:
        """Inject faults between two generations."""
        job, random = self.job, self.random
        victim = self._any_node()
        for fault in random.sample(
            ["wipe", "flip", "keepers", "coordinator", "shared"], random.randint(1, 3)
        ):
            match fault:
                case "wipe":
                    self.faults["node lost with its disk"] += 1
                    victim.lose()
                    self.is_hurt = True
                case "flip":
                    files = sorted(victim.kept.glob("*/*.distcp"))
                    chosen = [path for path in files if random.random() < 0.7]
                    for path in chosen:
                        victim.flip(path.parent.name, path.name)
                    self.faults["files flipped on a node"] += bool(chosen)
                    self.is_hurt |= bool(chosen)
                case "keepers":
                    for node in random.sample(job.nodes, random.randint(1, NODES)):
                        self.faults["keeper killed between generations"] += node.kill_keeper()
                case "coordinator":
                    self.faults["coordinator killed between generations"] += 1
                    self.coordinator.kill()
                    self.coordinator.start()
                case "shared":
                    # It stays away for good, so that counts once.
                    if job.shared.is_dir() or not job.shared.exists():
                        self.faults["shared storage away"] += 1
                        job.hide_shared()

    def _any_node(self) -> Node:
        return self.random.choice(self.job.nodes)


def _continue(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return


def main() -> None:
    """Run many rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with (
            Coordinator(folder, session_ttl=5.0, state=f"sqlite:///{folder}/muster.db") as coordinator,
            local_job(folder, coordinator.endpoint, NODES) as job,
        ):
            chaos = Chaos(job, coordinator, Random(arguments.seed))
            for number in range(arguments.rounds):
                chaos.round()
                print(f"round {number}: {sum(chaos.faults.values())} faults", flush=True)
    for fault, count in sorted(chaos.faults.items()):
        print(f"{count:4} {fault}")
    total = sum(chaos.faults.values())
    seconds = time.monotonic() - began
    print(f"{total} faults in {seconds:.0f} s: each time a step that the model allows, bit-equal")


if __name__ == "__main__":
    main()
