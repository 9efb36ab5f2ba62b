"""A rank of the demo's training job: it reports to the demo, and waits for it at some moments.

Reports are lines of JSON on stdout: who speaks, what happened at which step, and a text. So that the demo can
kill a child while it writes, the disks of some are slow: they take what was written when the demo says so.
"""

import json
import os
import sys
import time
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
PAUSES = (Moment(round=0, rank=2, step=325), Moment(round=1, rank=2, step=325))
"""Where training waits, or it would be over before the audience has read this far."""


def go(folder: Path, what: str, moment: Moment) -> Path:
    """The file by which the demo lets a rank (``training``) or its child (``writing``) go on."""
    return folder / f"{what}-goes-on-in-round-{moment.round}"


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
        told = {"round": self._round, "rank": self._rank, "pid": os.getpid()}
        # In one piece: the ranks of a node, and their children, share the agent's stdout.
        sys.stdout.write(f"{json.dumps(told | {'kind': kind, 'step': step, 'text': text})}\n")
        sys.stdout.flush()
        moment = Moment(self._round, self._rank, step)
        if kind == "trained" and moment in PAUSES:
            self.tell("pauses", step, "")
            _wait_for(go(self._folder, "training", moment))

    def _slow_fsync(self, file: int) -> None:
        path = Path(f"/proc/self/fd/{file}").readlink()
        if os.getpid() != self._pid and path.parent.name.startswith(".step-"):
            moment = Moment(self._round, self._rank, int(path.parent.name.split(".")[1].split("-")[1]))
            if moment in SLOW_DISKS:
                self.tell("writes", moment.step, "")
                _wait_for(go(self._folder, "writing", moment))
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
    except Exception as error:
        rank.tell("broke off", 0, str(error))
        sys.stdout.flush()
        # The other ranks of the process group are gone; there is nobody to say goodbye to.
        os._exit(1)


if __name__ == "__main__":
    main()
