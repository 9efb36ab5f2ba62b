"""``torch.save``, asynchronous."""

import time
from typing import Any

import torch

from muster.worker.barriers import GrpcBarrier
from muster.worker.saves.failure import failure_text
from muster.worker.saves.queue import DEFAULT_TIMEOUT, AsyncCallsQueue
from muster.worker.saves.request import AsyncRequest
from muster.worker.saves.staging import HostBuffers


class TorchAsyncCheckpoint:
    """Saves with the shape of ``torch.save``: each rank its own file, finalized when all have been written.

    All ranks of the barrier must make the same saves, and by default these are all ranks of the job. If rank
    0 alone is to save, give it ``barrier=GrpcBarrier(barrier_prefix="save-0", participants=[0])``; else its
    saves wait for the others until the timeout, and the log says so after some seconds.

    Args:
        persistent_queue: write in a worker process that is spawned once; default: fork a child for each save.
        barrier: as :class:`AsyncCallsQueue`.
        timeout: seconds, as :class:`AsyncCallsQueue`.

    Raises:
        ConnectError: the coordinator could not be reached.
        RefusedError: it refused this process.
    """

    def __init__(
        self,
        persistent_queue: bool = False,
        *,
        barrier: GrpcBarrier | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self._queue = AsyncCallsQueue(persistent_queue, barrier=barrier, timeout=timeout)
        self._buffers = HostBuffers()

    def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """``torch.save``, at once and in this process."""
        torch.save(obj, *args, **kwargs)

    def async_save(self, state_dict: Any, *args: Any, **kwargs: Any) -> int:  # noqa: ANN401
        """``torch.save``, aside. The training thread waits for the copy to the host and the fork only.

        Args:
            state_dict: what is saved: its state at this moment.
            args: further arguments of ``torch.save``, the path first.
            kwargs: further keyword arguments of it.

        Returns:
            The save's number.

        Raises:
            MemoryError: there is not enough free memory for the copy.
            MusterError: it was closed.
            Exception: what copying raised, or the fork. The save counts and has failed, for all ranks.
        """
        self._queue.check_open()
        began = time.monotonic()
        try:
            held = self._buffers.stage(state_dict)
        except BaseException as error:
            # The other ranks count this save, too.
            self._queue.schedule_failure(failure_text(error))
            raise
        request = AsyncRequest(torch.save, (held.state, *args), [], kwargs)
        return self._queue.schedule_async_request(
            request, on_written=held.release, prepared=time.monotonic() - began
        )

    def finalize_async_save(
        self, blocking: bool = False, no_dist: bool = True, terminate: bool = False
    ) -> None:
        """Finalize the saves that every rank has written.

        Args:
            blocking: wait for all saves that were scheduled.
            no_dist: as :meth:`AsyncCallsQueue.maybe_finalize_async_calls`.
            terminate: close afterwards.

        Raises:
            AsyncSaveError: a save was not committed, on any rank.
        """
        try:
            self._queue.maybe_finalize_async_calls(blocking, no_dist=no_dist)
        finally:
            if terminate:
                self._queue.close()

    def close(self, abort: bool = False) -> None:
        """Finalize every save that was scheduled, and let go of the writers.

        Args:
            abort: as :meth:`AsyncCallsQueue.close`.

        Raises:
            AsyncSaveError: a save was not committed, on any rank.
        """
        self._queue.close(abort)

    def _get_async_calls_queue(self) -> AsyncCallsQueue:
        """The queue of its saves: nvidia-resiliency-ext's tests look at it."""
        return self._queue
