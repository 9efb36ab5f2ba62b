"""A rank of the demo's job with local checkpoints. Arguments: ``FOLDER STEPS LOCAL_FOLDER``."""

import os
import sys
import time
import traceback
from pathlib import Path

from demo_rank import Rank
from training_job import train

PAUSE_STEP = 100
"""The last step that is saved before a node is lost. All ranks then wait until the demo has killed it."""


def continue_file(folder: Path) -> Path:
    """Return the path of the file that the demo makes when the node is lost, so that the ranks continue."""
    return folder / "node-is-lost"


def main() -> None:
    """Train, and report to the demo."""
    folder, steps, local = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    rank = Rank(folder)

    def tell(kind: str, step: int, text: str) -> None:
        rank.tell(kind, step, text)
        while (kind, step) == ("committed", PAUSE_STEP) and not continue_file(folder).exists():
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
