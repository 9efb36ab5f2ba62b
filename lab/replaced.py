"""A training job whose nodes are replaced: ``FOLDER``, a rank of it under torchrun.

Its state is a chain of digests. After step N it can have only one value, :func:`chain_after`, so a rank
that trained a step from another state has another value ever after. In each step the ranks compare theirs.
Each rank leaves lines: ``began STEP``, ``trained STEP``, ``saved STEP``; ``wrong STEP`` must not be there.
"""

import hashlib
import os
import signal
import sys
import time
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from muster.worker import Checkpointer, SavePoint

SIZE = 32
"""Bytes of a digest."""
PACE = 0.02
"""Seconds of a step."""
EVERY = 50
"""Steps between two saves that nobody asks for."""


def after(chain: bytes, step: int) -> bytes:
    """Return the state after a step that was trained from ``chain``."""
    return hashlib.sha256(chain + step.to_bytes(8)).digest()


@cache
def chain_after(step: int) -> bytes:
    """Return the only right state after a step."""
    chain = bytes(SIZE)
    for number in range(1, step + 1):
        chain = after(chain, number)
    return chain


class Trace:
    """The lines of one rank in one round.

    Args:
        folder: of the job.
    """

    def __init__(self, folder: Path) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        round = os.environ["MUSTER_ROUND"]
        self._file = (folder / f"lines-{int(round):04}-{rank}").open("a", buffering=1)
        born = folder / f"born-{os.getpid()}"
        born.write_text(f"{round} {rank} {size} {os.getppid()}")
        born.rename(folder / f"worker-{os.getpid()}")

    def say(self, what: str, step: int) -> None:
        """Leave a line."""
        self._file.write(f"{what} {step}\n")


def train(chain: bytes, step: int, finish: bool) -> tuple[bytes, bool, bool]:
    """Make a step, with a collective.

    Returns:
        The state, whether all ranks made the same step from the same state, and whether one is to finish.
    """
    mine = [step, int.from_bytes(chain[:6])]
    said = torch.tensor([*mine, *(-number for number in mine), int(finish)])
    dist.all_reduce(said, dist.ReduceOp.MAX)
    time.sleep(PACE)
    greatest, least = said[:2].tolist(), (-said[2:4]).tolist()
    return after(chain, step), greatest == least == mine, bool(said[4])


def main() -> None:
    """Train until a file tells to finish, or until the save point does."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    trace = Trace(folder)
    state = {"chain": torch.zeros(SIZE, dtype=torch.uint8)}
    checkpointer = Checkpointer(folder / "checkpoints")
    with SavePoint(signals=[signal.SIGTERM]) as point:
        committed = checkpointer.resume(state)
        step = committed.step if committed is not None else 0
        chain, finished = bytes(state["chain"].tolist()), False
        trace.say("began" if chain == chain_after(step) else "wrong", step)
        while not finished:
            step += 1
            chain, right, finished = train(chain, step, (folder / "finish").exists())
            trace.say("trained" if right and chain == chain_after(step) else "wrong", step)
            asked = point.reached(step)
            if asked or finished or step % EVERY == 0:
                state["chain"] = torch.tensor(list(chain), dtype=torch.uint8)
                checkpointer.save(step, state)
                checkpointer.finalize(blocking=True)
                trace.say("saved", step)
            if asked:
                point.done()
                if point.stop:
                    break
    checkpointer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
