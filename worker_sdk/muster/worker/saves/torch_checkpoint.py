"""``torch.save``, asynchronous."""

import io
import time
from collections.abc import Callable
from typing import Any

from muster.worker.barriers import GrpcBarrier
from muster.worker.saves.failure import failure_text
from muster.worker.saves.memory.staging import Held, HostBuffers
from muster.worker.saves.queue.queue import DEFAULT_TIMEOUT, AsyncCallsQueue
from muster.worker.saves.request import AsyncRequest
from muster.worker.saves.storage.replacement import Replacement, is_replaceable, write_in_place


class TorchAsyncCheckpoint:
    """Saves with the shape of ``torch.save``: each rank its own file, finalized when all have been written.

    All ranks of the barrier must make the same saves, and by default these are all ranks of the job. If rank
    0 alone is to save, give it ``barrier=GrpcBarrier(barrier_prefix="save-0", participants=[0])``; else its
    saves wait for the others until the timeout, and the log says so after some seconds.

    A file is written beside the one of its path, and takes its place when every rank has written. Then it is
    on the disk.

    Args:
        persistent_queue: write in a worker process that is spawned once; default: fork a child for each save.
        barrier: as :class:`AsyncCallsQueue`.
        timeout: seconds, as :class:`AsyncCallsQueue`.

    Raises:
        ConnectError: the coordinator could not be reached.
        RefusedError: it refused this process.
        ValueError: the timeout is not a finite number above 0.
    """

    def __init__(
        self,
        persistent_queue: bool = False,
        *,
        barrier: GrpcBarrier | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> None:
        self._queue = AsyncCallsQueue(persistent_queue, barrier=barrier, timeout=timeout)
        # What goes to the persistent worker is copied on its way there.
        self._buffers = None if persistent_queue else HostBuffers()

    def save(self, obj: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Save as ``torch.save`` does, now and in this process.

        Args:
            obj: what is saved.
            args: further arguments of ``torch.save``, the path first.
            kwargs: further keyword arguments of it.
        """
        target, args, kwargs = _target(*args, **kwargs)
        if not is_replaceable(target):
            write_in_place(obj, target, *args, **kwargs)
            return
        file = Replacement(target)
        try:
            file.write(obj, *args, **kwargs)
            file.commit()
        finally:
            file.discard()

    def async_save(self, state_dict: Any, *args: Any, **kwargs: Any) -> int:  # noqa: ANN401
        """Call ``torch.save`` in the background.

        The training thread waits only for the copy to the host and the fork.

        Args:
            state_dict: what is saved: its state at this moment.
            args: further arguments of ``torch.save``, the path first. An open file works with a fork only.
            kwargs: further keyword arguments of it.

        Returns:
            The save's number.

        Raises:
            MemoryError: there is not enough free memory for the copy.
            MusterError: it was closed.
            TypeError: there is no path; or what it is to be written to is in this process's memory.
            Exception: what copying raised, or the fork. The save counts and has failed, for all ranks.
        """
        self._queue.check_open()
        began = time.monotonic()
        target, args, kwargs = _target(*args, **kwargs)
        if isinstance(target, io.BytesIO | io.StringIO):
            raise TypeError("f is in the memory of this process, and another one writes. Give a path.")
        write: Callable[..., None] = write_in_place
        commit = discard = _nothing
        if is_replaceable(target):
            file = Replacement(target)
            write, commit, discard = file.write, file.commit, file.discard
        else:
            args = (target, *args)
        held: Held | None = None
        try:
            if self._buffers is not None:
                held = self._buffers.stage(state_dict)
        except BaseException as error:
            # The other ranks count this save, too.
            self._queue.schedule_failure(failure_text(error))
            raise
        state = state_dict if held is None else held.state
        return self._queue.schedule_async_request(
            AsyncRequest(write, (state, *args), [], kwargs),
            wait_for_copies=None if held is None else held.wait,
            on_written=None if held is None else held.release,
            # On every rank, whatever its target: all of them vote on it.
            commit=lambda _: commit(),
            on_decided=discard,
            prepared=time.monotonic() - began,
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


def _target(f: Any, *args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:  # noqa: ANN401
    """Return the target of ``torch.save``, given by position or by name, and its other arguments."""
    return f, args, kwargs


def _nothing() -> None:
    """For what is not a file of its own."""
