"""Orbax's asynchronous saves, finished by all processes or by none: the barrier of its ``AsyncOptions``.

Needs no torch. Tried with orbax-checkpoint 0.12.8. Where its saves differ, the import says so.
"""

import inspect
import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from itertools import count
from typing import Any, TypeVar

import jax
from orbax.checkpoint import AsyncCheckpointer, CheckpointManager

from muster.worker.decision import Decision, Outcome
from muster.worker.errors import MusterError, error_for
from muster.worker.group_barrier import GroupBarrier
from muster.worker.groups.reason import failure_text

try:
    from orbax.checkpoint._src.checkpointers import async_checkpointer as place
except ImportError as _error:
    raise ImportError(
        f"muster.worker.integrations.orbax was tried with orbax-checkpoint 0.12.8; here {_error}."
    ) from _error

__all__ = ["SaveBarrier", "barrier_sync_fn"]

logger = logging.getLogger(__name__)

TRIED = "orbax-checkpoint 0.12.8"
PREFIX = "checkpoint/orbax"
"""The group that decides saves; that of a process's second function ends in ``-2``."""
GIVEN_UP = "given up"
"""What a process says in place of Orbax's key when a collective of JAX has failed in its save."""
LAST_WORD = 15.0
"""Seconds that a process waits then for who is lost: a little more than the default session TTL."""
COLLECTIVES = "jax.experimental.multihost_utils"
"""The module in which JAX's own barrier raises."""
TOLD = "_muster_told"
"""The attribute of an error that all processes know of."""

T = TypeVar("T")

_SIGNATURES: list[tuple[object, str, set[str]]] = [
    (
        place,
        "_background_wait_for_commit_futures",
        {"directory", "commit_futures", "sync_fn", "timeout_secs"},
    ),
    (getattr(place, "_AsyncManager", None), "__init__", {"barrier_sync_fn"}),
    (AsyncCheckpointer, "save", {"directory"}),
    (CheckpointManager, "save", {"step"}),
]
for _owner, _name, _parameters in _SIGNATURES:
    if not inspect.signature(getattr(_owner, _name, lambda: None)).parameters.keys() >= _parameters:
        raise ImportError(f"muster.worker.integrations.orbax was tried with {TRIED}; here {_name} differs.")

_numbers = count(1)
"""Numbers the functions that were given no barrier."""


def barrier_sync_fn(barrier: GroupBarrier | None = None) -> "SaveBarrier":
    """What Orbax's asynchronous saves are to wait at.

    One option of a script changes::

        options = CheckpointManagerOptions(async_options=AsyncOptions(barrier_sync_fn=barrier_sync_fn()))

    Make one for each checkpointer or manager, in the same order in all processes, after
    ``jax.distributed.initialize()``.

    Args:
        barrier: decides the saves, and is for nothing else; default: one of all processes of JAX, of group
            ``checkpoint/orbax`` (the second of a process: ``checkpoint/orbax-2``), taken from the
            environment. If JAX has one process only, nothing is waited for.

    Raises:
        ConnectError: the coordinator could not be reached.
        RefusedError: it refused this process.
    """
    if barrier is None and (world := jax.process_count()) > 1:
        number = next(_numbers)
        prefix = PREFIX if number == 1 else f"{PREFIX}-{number}"
        barrier = GroupBarrier(jax.process_index(), world, prefix)
    return SaveBarrier(barrier)


class SaveBarrier:
    """Orbax's barriers, decided by the coordinator: all processes pass one, or all fail and hear why.

    :func:`barrier_sync_fn` makes it.

    Args:
        barrier: of all processes that save; None: there is one.
    """

    def __init__(self, barrier: GroupBarrier | None) -> None:
        self._barrier = barrier
        self._turn = threading.Lock()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's: wait for all processes. While the coordinator cannot be reached, wait for it.

        Args:
            key: which barrier this is, the same in all processes.
            timeout_ms: milliseconds that all may take, counted from the first one's arrival.

        Raises:
            BarrierError: a process has failed, is lost or has not come; the message names it.
            MusterError: the processes are at different barriers, or one has given its save up.
            RefusedError: the coordinator refused this process.
        """
        if self._barrier is None:
            return
        decision = self._vote(self._barrier, None, key, max(timeout_ms, 1) / 1000)
        if (error := self._error(self._barrier, decision)) is not None:
            vars(error)[TOLD] = True
            raise error

    def failed(self, error: BaseException) -> MusterError | None:
        """Say that a save of this process has failed, and with it that of all.

        Args:
            error: why; what all know already is not said again.

        Returns:
            Why it has failed for all, if not for this error: another process is lost, or failed first.
        """
        if self._barrier is None or vars(error).get(TOLD):
            return None
        vars(error)[TOLD] = True
        own = not _is_of_a_collective(error)
        failure, word = (failure_text(error), "") if own else (None, GIVEN_UP)
        try:
            decision = self._vote(self._barrier, failure, word, LAST_WORD)
        except MusterError as unheard:
            logger.error("a save has failed, and the others do not hear why: %s", unheard)  # noqa: TRY400
            return None
        if own and self._barrier.rank in {failure.rank for failure in decision.failures}:
            return None
        if (reason := self._error(self._barrier, decision)) is not None:
            logger.error("a save has failed: %s", reason)
            vars(reason)[TOLD] = True
        return reason

    def _vote(self, barrier: GroupBarrier, failure: str | None, word: str, timeout: float) -> Decision:
        """Arrive, and go on asking while the coordinator is away."""
        with self._turn:
            return barrier.vote_until_decided(
                lambda error: logger.warning("a save waits: %s", error),
                failure,
                timeout,
                word.encode("utf-8", "backslashreplace"),
            )

    def _error(self, barrier: GroupBarrier, decision: Decision) -> MusterError | None:
        """Why all fail; None: they have come to the same barrier."""
        if decision.outcome is not Outcome.RELEASED:
            return error_for(decision)
        said = {rank: word.decode("utf-8", "replace") for rank, word in sorted(decision.payloads.items())}
        if quitters := [rank for rank, word in said.items() if word == GIVEN_UP]:
            return MusterError(
                f'a save of group "{barrier.prefix}" was given up: a collective of JAX failed in it on '
                f"processes {quitters}. Their own errors say why."
            )
        if len(set(said.values())) > 1:
            where = "; ".join(f"process {rank} at {word!r}" for rank, word in said.items())
            return MusterError(
                f'the processes are out of step in group "{barrier.prefix}", run {barrier.run_id}: {where}. '
                "Make the same saves in the same order in all processes, with a barrier_sync_fn() for each "
                "checkpointer, and restart the job."
            )
        return None


def _is_of_a_collective(error: BaseException) -> bool:
    """Whether another process is to blame, as far as can be told."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == COLLECTIVES for frame, _ in frames)


def _knows(theirs: Callable[..., None]) -> Callable[..., None]:
    """What makes a checkpointer's saves in the background: keep whose barrier it waits at."""

    @wraps(theirs)
    def begin(manager: Any, *, barrier_sync_fn: object, **options: object) -> None:  # noqa: ANN401
        theirs(manager, barrier_sync_fn=barrier_sync_fn, **options)
        if isinstance(barrier_sync_fn, SaveBarrier):
            manager._sync_fn = _SyncFn(barrier_sync_fn)

    return begin


class _SyncFn:
    """What Orbax hands to the thread of a save."""

    def __init__(self, barrier: SaveBarrier) -> None:
        self.barrier = barrier

    def __call__(self, key: str, timeout_ms: int) -> None:
        self.barrier(key=key, timeout_ms=timeout_ms)


def _finishes(theirs: Callable[..., None]) -> Callable[..., None]:
    """What runs in the thread of a save: what is raised there would be silence to the others."""

    @wraps(theirs)
    def finish(
        directory: object,
        commit_futures: Sequence[Any],
        *arguments: object,
        sync_fn: object,
        timeout_secs: float,
        **options: object,
    ) -> None:
        try:
            theirs(
                directory, commit_futures, *arguments, sync_fn=sync_fn, timeout_secs=timeout_secs, **options
            )
        except BaseException as error:
            if isinstance(sync_fn, _SyncFn):
                reason = sync_fn.barrier.failed(error)
                _see_the_end(commit_futures, timeout_secs)
                if reason is not None:
                    raise reason from error
            raise

    return finish


def _see_the_end(writes: Sequence[Any], timeout: float) -> None:
    """Of writes whose save has failed: another save of the step would find their files among its own."""
    deadline = time.monotonic() + timeout
    for write in writes:
        with suppress(Exception):
            write.result(timeout=max(0.0, deadline - time.monotonic()))


def _saves(theirs: Callable[..., T]) -> Callable[..., T]:
    """What begins a save, in the caller's thread: of a manager, or of a checkpointer."""

    @wraps(theirs)
    def save(saver: Any, *arguments: object, **options: object) -> T:  # noqa: ANN401
        try:
            return theirs(saver, *arguments, **options)
        except Exception as error:  # An interrupted rank leaves; the coordinator reports it to the others.
            checkpointer = getattr(saver, "_checkpointer", saver)
            sync_fn = getattr(getattr(checkpointer, "_async_manager", None), "_sync_fn", None)
            if isinstance(sync_fn, _SyncFn):
                for one in (checkpointer, saver):
                    with suppress(Exception):
                        one.wait_until_finished()  # The barriers of a save before come before this one's.
                if (reason := sync_fn.barrier.failed(error)) is not None:
                    raise reason from error
            raise

    return save


place._AsyncManager.__init__ = _knows(place._AsyncManager.__init__)
place._background_wait_for_commit_futures = _finishes(place._background_wait_for_commit_futures)
AsyncCheckpointer.save = _saves(AsyncCheckpointer.save)
CheckpointManager.save = _saves(CheckpointManager.save)
