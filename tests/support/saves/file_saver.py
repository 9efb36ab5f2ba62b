"""As simple a checkpointer as can be, on the queue of saves alone; and a caller that believes every child.

Such a checkpointer has nothing but the votes between a child that died and a checkpoint that lies.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from muster.checkpoint.committed import Committed, SaveAttempt
from muster.checkpoint.directory import CheckpointDirectory
from muster.worker import GrpcBarrier
from muster.worker.saves import AsyncCallsQueue, AsyncRequest
from muster.worker.saves.writers.callers import AsyncCaller, Ending, ForkCaller, Write


class FileSaver:
    """One file of each rank; rank 0 commits.

    Args:
        folder: where the checkpoints go.
        barrier: decides.
        caller: starts the writes.
        timeout: seconds for one save.
    """

    def __init__(
        self, folder: Path, barrier: GrpcBarrier, caller: AsyncCaller, timeout: float = 60.0
    ) -> None:
        self._barrier = barrier
        self._queue = AsyncCallsQueue(barrier=barrier, caller=caller, timeout=timeout)
        self._directory = CheckpointDirectory(folder)
        self._steps: dict[int, int] = {}
        self.latest = self._directory.latest

    def save(self, step: int, state: dict[str, Any], before: Callable[[], None] = lambda: None) -> None:
        """Begin to save; ``before`` is called in the child."""
        unfinished = self._directory.unfinished(step, SaveAttempt(self._barrier.generation, step))

        def write() -> None:
            before()
            unfinished.mkdir(exist_ok=True)
            torch.save(state["weight"].to_local().clone(), self._file(unfinished))

        def commit(decision: Any) -> None:
            if self._barrier.rank == 0:
                unfinished.mkdir(exist_ok=True)
                made = Committed(
                    step,
                    self._barrier.world_size,
                    "job",
                    "save",
                    decision.sequence,
                    self._directory.path(step),
                )
                self._directory.commit(unfinished, made)

        idx = self._queue.schedule_async_request(AsyncRequest(write, (), []), commit=commit)
        self._steps[idx] = step

    def finalize(self, blocking: bool = False) -> list[int]:
        """The steps that were committed since the last call."""
        done = self._queue.maybe_finalize_async_calls(blocking, no_dist=True)
        return [self._steps[idx] for idx in done]

    def load(self, state: dict[str, Any]) -> Committed:
        """Load the last committed one."""
        found = self.latest()
        assert found is not None
        state["weight"].to_local().copy_(torch.load(self._file(Path(found.path))))
        return found

    def _file(self, folder: Path) -> Path:
        return folder / f"rank-{self._barrier.rank}.pt"

    def close(self) -> None:
        """Wait for all."""
        self._queue.close()


class BlindCaller(ForkCaller):
    """Ignores how children end."""

    def start(self, request: AsyncRequest, wait_for_copies: Callable[[], None] | None = None) -> Write:
        write = super().start(request, wait_for_copies)
        wait = write.wait
        write.wait = lambda timeout: Ending(None, wait(timeout).seconds)  # type: ignore[method-assign]
        return write
