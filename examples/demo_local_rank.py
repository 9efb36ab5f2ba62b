"""A rank of the demo's job with local checkpoints. Arguments: ``FOLDER STEPS LOCAL_FOLDER``."""

import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from demo_rank import Rank
from training_job import SAVE_EVERY, train

FIRST_PAUSE = 2 * SAVE_EVERY
"""The ranks pause after the commit of this step, or of a later one, until the demo has killed a node."""


def continue_file(folder: Path) -> Path:
    """Return the path of the file that the demo makes when the node is lost, so that the ranks continue."""
    return folder / "node-is-lost"


def main() -> None:
    """Train, and report to the demo."""
    folder, steps, local = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    rank = Rank(folder)
    committed = 0

    def tell(kind: str, step: int, text: str) -> None:
        nonlocal committed
        rank.tell(kind, step, text)
        if kind == "committed":
            committed = step
        saved = step - step % SAVE_EVERY
        may_pause = kind == "trained" and FIRST_PAUSE <= saved < step and not continue_file(folder).exists()
        # All ranks train to this step. A rank may hear of a commit some steps later than another one. If the
        # other one paused before that, this rank would wait for it in a collective.
        if may_pause and _all(committed == saved):
            rank.tell("paused", saved, "")
            while not continue_file(folder).exists():
                time.sleep(0.05)

    try:
        loss = train(folder / "checkpoints", steps, tell, local)
        rank.tell("done", steps, f"{loss:.2f}")
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _all(is_so: bool) -> bool:
    """Return whether it is so on all ranks."""
    answer = torch.tensor(int(is_so))
    dist.all_reduce(answer, dist.ReduceOp.MIN)
    return bool(answer)


if __name__ == "__main__":
    main()
