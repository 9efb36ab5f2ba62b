"""Faults in a job whose checkpoints are on its nodes, and what it must resume from after each of them.

``python -m tests.support.saves.local_chaos --rounds 120`` runs many rounds, and prints what was done.

Each round begins a generation, resumes, saves, and is then hit by some faults. At most one node loses its
disk or has its copies damaged in a round, as the one copy of each part allows. So a plain model knows the
steps that the next round may resume from: the newest one, if all disks are whole; else any from the newest
one with copies on.
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
    """Steps that were saved, in all rounds."""
    newest: int | None = None
    """The newest step that all ranks have finalized since the last recovery, or resumed from."""
    copied: int | None = None
    """The newest one of these with a copy of each part."""
    is_hurt: bool = False
    """Whether a node has lost its disk or its files since then."""

    def round(self) -> None:
        """Begin a generation, resume, save, and do damage."""
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
        """Do something while the ranks resume."""
        match self.random.choice(["nothing", "coordinator", "keeper", "stopped keeper"]):
            case "coordinator":
                self.faults["coordinator killed while it decides"] += 1
                time.sleep(self.random.random() * 0.3)
                self.coordinator.kill()
                self.coordinator.start()
            case "keeper":
                self.faults["keeper killed while ranks resume"] += 1
                time.sleep(self.random.random() * 0.3)
                self._any_node().kill_keeper()
            case "stopped keeper":
                self.faults["keeper stopped while ranks resume"] += 1
                pid = self._any_node().keeper
                if pid is not None:
                    os.kill(pid, signal.SIGSTOP)
                    threading.Timer(PAUSE, lambda: _continue(pid)).start()

    def _hurt(self) -> None:
        """Do damage between two generations."""
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
                    self.faults["files flipped on a node"] += 1
                    for path in sorted(victim.kept.glob("*/*.distcp")):
                        if random.random() < 0.7:
                            victim.flip(path.parent.name, path.name)
                    self.is_hurt = True
                case "keepers":
                    for node in random.sample(job.nodes, random.randint(1, NODES)):
                        self.faults["keeper killed between generations"] += 1
                        node.kill_keeper()
                case "coordinator":
                    self.faults["coordinator killed between generations"] += 1
                    self.coordinator.kill()
                    self.coordinator.start()
                case "shared":
                    self.faults["shared storage away"] += 1
                    if job.shared.is_dir() or not job.shared.exists():
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
