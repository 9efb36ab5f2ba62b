"""A rank of the demo's last job, which keeps its checkpoints on the nodes: ``FOLDER STEPS LOCAL``."""

import os
import sys
import time
import traceback
from pathlib import Path

from demo_rank import Rank
from training_job import train

PAUSE = 100
"""The step that is saved last before a node is lost: all ranks wait until it has been."""


def go(folder: Path) -> Path:
    """The file by which the demo lets the ranks go on."""
    return folder / "node-is-lost"


def main() -> None:
    """Train, and report to the demo."""
    folder, steps, local = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    rank = Rank(folder)

    def tell(kind: str, step: int, text: str) -> None:
        rank.tell(kind, step, text)
        while (kind, step) == ("committed", PAUSE) and not go(folder).exists():
            time.sleep(0.05)

    try:
        loss = train(folder / "checkpoints", steps, tell, local)
        rank.tell("done", steps, f"{loss:.2f}")
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
