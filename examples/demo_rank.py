"""A rank of the demo's training job: it reports to the demo, and waits for it where it is told to.

Reports are lines of JSON on stdout: who speaks, what kind of thing it is, and a text.
"""

import json
import os
import sys
import time
from pathlib import Path

from training_job import train

RANK = int(os.environ["RANK"])
ROUND = int(os.environ["MUSTER_ROUND"])


def tell(kind: str, text: str) -> None:
    """Report to the demo."""
    line = json.dumps({"round": ROUND, "rank": RANK, "pid": os.getpid(), "kind": kind, "text": text})
    print(line, flush=True)


def main() -> None:
    """Train; the rank that is to be held waits before the barrier of one step for a file to appear."""
    folder, steps, held, hold_at = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

    def before_barrier(step: int) -> None:
        if (RANK, step) == (held, hold_at):
            tell("holds", str(step))
            while not (folder / f"go-{ROUND}").exists():
                time.sleep(0.05)

    try:
        loss = train(folder, steps, before_barrier, lambda text: tell("says", text))
        tell("done", f"{loss:.2f}")
    except Exception as error:
        tell("failed", f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        # The other ranks of the process group are gone; there is nobody to say goodbye to.
        os._exit(1)


if __name__ == "__main__":
    main()
