"""A rank of the demo's training job: it reports to the demo, and waits for it at some moments.

Reports are lines of JSON on stdout: the rank, what happened at which step, and a text. Some ranks have
a slow disk, which takes what was written only when the demo says so: the demo kills a child while it writes.
"""

import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from training_job import train


@dataclass(frozen=True)
class Moment:
    """When a rank is at a step of a round."""

    round: int
    rank: int
    step: int


CHILD_KILLED = Moment(round=0, rank=1, step=100)
NODE_KILLED = Moment(round=0, rank=2, step=300)
COORDINATOR_KILLED = Moment(round=1, rank=2, step=300)
SLOW_DISKS = (CHILD_KILLED, NODE_KILLED, COORDINATOR_KILLED)
PAUSE = 325
"""The step at which all ranks wait, or training would be over before the audience has read this far."""


def go(folder: Path, what: str, round: int) -> Path:
    """The file by which the demo lets all ranks (``training``) or a child (``writing``) go on."""
    return folder / f"{what}-goes-on-in-round-{round}"


class Rank:
    """This process, and its children."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rank, self._round = int(os.environ["RANK"]), int(os.environ["MUSTER_ROUND"])
        self._pid = os.getpid()
        self._fsync = os.fsync
        os.fsync = self._slow_fsync  # type: ignore[assignment]

    def tell(self, kind: str, step: int, text: str) -> None:
        """Report to the demo, and pause where it wants."""
        report = {"round": self._round, "rank": self._rank, "pid": os.getpid()}
        # In one piece: the ranks of a node, and their children, share the agent's stdout.
        sys.stdout.write(f"{json.dumps(report | {'kind': kind, 'step': step, 'text': text})}\n")
        sys.stdout.flush()
        if (kind, step) == ("trained", PAUSE):
            _wait_for(go(self._folder, "training", self._round))

    def _slow_fsync(self, file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        if os.getpid() != self._pid and path.parent.name.startswith(".step-"):
            moment = Moment(self._round, self._rank, int(path.parent.name.split(".")[1].split("-")[1]))
            if moment in SLOW_DISKS:
                self.tell("writes", moment.step, "")
                _wait_for(go(self._folder, "writing", self._round))
        self._fsync(file)


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def main() -> None:
    """Train, in the folder and for the steps that the demo says."""
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    rank = Rank(folder)
    try:
        loss = train(folder / "checkpoints", steps, rank.tell)
        rank.tell("done", steps, f"{loss:.2f}")
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        # The other ranks of the process group are gone; there is nobody to say goodbye to.
        os._exit(1)


if __name__ == "__main__":
    main()
