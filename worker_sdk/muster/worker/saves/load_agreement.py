"""Loads one checkpoint in agreement of all ranks: all load the same bytes, or none does.

Each rank reads the metadata that a load needs, and all ranks meet. Then each rank loads and verifies every
item, and all meet again. If a rank finds damage, all ranks hear of it. If a rank fails in another way, the
load fails on all ranks, with that rank's reason.
"""

import json
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, NoReturn, TypeAlias

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from muster.checkpoint.committed import Committed
from muster.checkpoint.damage import Damage, DamageError
from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision
from muster.worker.errors import MusterError, error_for
from muster.worker.saves.failure import failure_text
from muster.worker.saves.storage.reading import Opened, VerifyingReader

BROKEN = b"broken"
"""The payload of a rank whose collective failed: another rank is to blame, and the coordinator names it."""

Load: TypeAlias = Callable[[VerifyingReader], None]
"""Loads into the state, through a reader."""


class Agreement(ABC):
    """One rank's part in loads of all ranks.

    Args:
        barrier: where the ranks meet; nothing else uses it.
        timeout: seconds that the slowest rank may take to read.
    """

    OPENING_BEGINS = False
    """Whether a load begins with the meeting after the metadata is read. A rank that does not hear of the
    first meeting can call again: its next load begins with the same one."""

    def __init__(self, barrier: GrpcBarrier, timeout: float) -> None:
        self._barrier = barrier
        self._timeout = timeout
        self._filled = False
        """Whether something may have been loaded into the state."""
        self._left = False
        """Whether this rank has left a load in whose midst the others may still be."""

    # ------------------------------------------------------------------ one attempt

    @abstractmethod
    def _read_first(self, made: Committed) -> Opened:
        """Read what a load of a checkpoint needs first.

        Raises:
            DamageError: it is damaged.
            Exception: it cannot be read.
        """

    def _attempt(self, made: Committed, load: Load) -> Damage | None:
        """Load a checkpoint on all ranks.

        Returns:
            Its damage, the same on all ranks; None if it was loaded.
        """
        self._filled = False
        opened, damage = self._open(made)
        return damage if opened is None else self._load(opened, load)

    def _open(self, made: Committed) -> tuple[Opened | None, Damage | None]:
        opened, found, error = None, None, None
        try:
            opened = self._read_first(made)
        except DamageError as damaged:
            found = self._own(damaged.damage)
        except BaseException as failed:
            error = failed
        damage = self._judge(made, self._meet(error, _encoded(found), begins=self.OPENING_BEGINS))
        return (None if damage is not None else opened), damage

    def _load(self, opened: Opened, load: Load) -> Damage | None:
        found: Damage | None = None
        error: BaseException | None = None
        self._filled = True
        try:
            load(VerifyingReader(opened))
        except BaseException as failed:
            error = failed
            if isinstance(failed, CheckpointException):
                # All ranks have this exception. Each votes on its own failure in it.
                rank = dist.get_rank() if dist.is_initialized() else 0
                error = failed.failures[rank][0] if rank in failed.failures else None
        if isinstance(error, DamageError):
            found, error = self._own(error.damage), None
        if error is not None and _of_a_collective(error):
            self._hear_who_is_lost(opened.made, error)
        if isinstance(error, Exception) and not isinstance(error, MusterError):
            error = _wrapped(opened.made, error)
        decision = self._meet(error, _encoded(found))
        if BROKEN in decision.payloads.values():
            raise MusterError(
                f"{opened.made.path} is not loaded on all ranks: a collective of torch's failed on some."
            )
        return self._judge(opened.made, decision)

    def _hear_who_is_lost(self, made: Committed, error: BaseException) -> NoReturn:
        """Raise the coordinator's error for the rank that is to blame for a failed collective."""
        decision = self._vote(None, BROKEN)
        raise (_wrapped(made, error) if decision.released else error_for(decision)) from error

    def _own(self, damage: Damage) -> Damage:
        return replace(damage, rank=self._barrier.rank, host=socket.gethostname())

    # ------------------------------------------------------------------ what all ranks hear

    def _check_in_step(self) -> None:
        """Refuse a load after one whose end this rank does not know.

        Raises:
            MusterError: the last load ended before this rank heard how it ends.
        """
        if self._left:
            raise MusterError(
                "the last load ended here before this rank heard from the coordinator how it ends, and the "
                "other ranks may be in the midst of it. Build the state again, and restart the job on all "
                "ranks."
            )

    def _vote(self, failure: str | None, payload: bytes, *, begins: bool = False) -> Decision:
        self._left = not begins
        decision = self._barrier.vote(failure, self._timeout, payload)
        self._left = False
        return decision

    def _meet(self, error: BaseException | None, payload: bytes, *, begins: bool = False) -> Decision:
        """Meet all ranks. If one fails, all fail."""
        decision = self._vote(None if error is None else failure_text(error), payload, begins=begins)
        if error is not None:
            raise error
        if not decision.released:
            raise error_for(decision)
        return decision

    def _judge(self, made: Committed, decision: Decision) -> Damage | None:
        """Return the damage that a rank found, if any."""
        return next((_decoded(word) for _, word in sorted(decision.payloads.items()) if word), None)


def _wrapped(made: Committed, error: BaseException) -> RuntimeError:
    wrapped = RuntimeError(f"{made.path} cannot be loaded: {error}")
    wrapped.__cause__ = error
    return wrapped


def _of_a_collective(error: BaseException) -> bool:
    """Return whether a collective failed, as far as its error tells: then another rank is to blame."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "NCCL" in str(error)


def _encoded(damage: Damage | None) -> bytes:
    return b"" if damage is None else json.dumps(asdict(damage)).encode()


def _decoded(word: bytes) -> Damage:
    said: Mapping[str, Any] = json.loads(word)
    return Damage(**said)
