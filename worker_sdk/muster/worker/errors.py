"""The errors of barriers and stores.

If torch is loaded, they are subclasses of its ``DistStoreError``, so existing handlers catch them. A process
without torch has the same errors.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from muster.worker.decision import Decision, Failure, MissingRank, Outcome

if TYPE_CHECKING or sys.modules.get("torch") is not None:
    from torch.distributed import DistStoreError as _Root
else:

    class _Root(RuntimeError):
        """The base class until torch is loaded; :mod:`muster.worker.torch_compat` replaces it then."""


class MusterError(_Root):
    """The base class of all errors of this SDK."""


class ConnectError(MusterError):
    """The coordinator could not be reached in time, or the session could not be set up in time."""


class RefusedError(MusterError):
    """The coordinator refused a request.

    Args:
        message: what was refused, why, and what to do next.
        reason: the stable reason, as in docs/errors.md.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.reason), vars(self)


class StoreTimeoutError(MusterError):
    """Not all keys of a wait were set in time.

    Args:
        message: the missing keys, and what to do next.
        keys: all keys of the wait.
    """

    def __init__(self, message: str, keys: Sequence[str]) -> None:
        super().__init__(message)
        self.keys = tuple(keys)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.keys), vars(self)


class BarrierError(MusterError):
    """A barrier was not released. All ranks get the same outcome.

    Args:
        message: what happened, which ranks are missing, and what to do next.
        prefix: the barrier's group.
        sequence: its number within the group.
        outcome: its outcome.
        missing: every rank that had not arrived.
    """

    def __init__(
        self,
        message: str,
        prefix: str,
        sequence: int,
        outcome: Outcome,
        missing: Sequence[MissingRank] = (),
    ) -> None:
        super().__init__(message)
        self.prefix = prefix
        self.sequence = sequence
        self.outcome = outcome
        self.missing = list(missing)

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (str(self), self.prefix, self.sequence, self.outcome, self.missing)
        return type(self), fields, vars(self)


class BarrierTimeoutError(BarrierError):
    """Not all ranks arrived within the timeout of the first arrival."""


class BarrierAbortedError(BarrierError):
    """A rank voted to fail, an operator aborted it, or other ranks took the group over; see the message."""


class MemberLostError(BarrierError):
    """A rank that the barrier needed left, or died."""


class BarrierMismatchError(BarrierError):
    """Ranks disagreed on the world size or on the participants."""


class OutcomeUnknownError(BarrierError):
    """The coordinator could not be reached, so this rank does not know the outcome.

    That neither releases nor fails the barrier. To execute the barrier again asks for the outcome of the same
    sequence.
    """


class AsyncSaveError(MusterError):
    """No rank has committed a save, and none has finalized it.

    Args:
        message: what happened: which ranks failed or are missing, where they run, and why.
        call_idx: the number of the save in its queue.
        decision: the coordinator's decision.
    """

    def __init__(self, message: str, call_idx: int, decision: Decision) -> None:
        super().__init__(message)
        self.call_idx = call_idx
        self.decision = decision
        self.finalized: tuple[int, ...] = ()
        """What the same call finalized before: numbers of saves, or the steps of a ``Checkpointer``."""

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The ranks that failed to write, with exit status and the child's traceback."""
        return self.decision.failures

    @property
    def missing(self) -> tuple[MissingRank, ...]:
        """The ranks that had not reported the end of their write."""
        return self.decision.missing

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.call_idx, self.decision), vars(self)


_BY_OUTCOME: dict[Outcome, type[BarrierError]] = {
    Outcome.TIMED_OUT: BarrierTimeoutError,
    Outcome.ABORTED: BarrierAbortedError,
    Outcome.MEMBER_LOST: MemberLostError,
    Outcome.MISMATCHED: BarrierMismatchError,
}


def error_for(decision: Decision) -> BarrierError:
    """Return the exception for a decision other than a release."""
    return _BY_OUTCOME.get(decision.outcome, BarrierError)(
        decision.message, decision.prefix, decision.sequence, decision.outcome, decision.missing
    )
