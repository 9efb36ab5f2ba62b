"""This process's training step, which people see without any barrier."""

import math
import operator
import os
import sys
from contextlib import suppress
from typing import SupportsIndex

CHECK_INTERVAL = 5.0
"""Seconds between two checks for a new step, until the coordinator names an interval."""

_number: SupportsIndex | None = None


def step(number: SupportsIndex) -> None:
    """Note that this process has reached a training step.

    It costs an assignment. If the step has changed, each session reports it every few seconds, so people see
    a stalled job before its next barrier. A process without a barrier reports nothing.

    Args:
        number: the step, from 0; all ranks count alike. A value that is not a whole number is not reported.
    """
    global _number
    _number = number


class StepReporter:
    """Decides when one stream reports the step."""

    def __init__(self) -> None:
        self.interval = CHECK_INTERVAL
        """Seconds between two messages."""
        self._reported: int | None = None
        self._due_at = math.inf
        """Never, until the coordinator has asked for steps: version 0.1 does not know them."""

    def welcomed(self, interval: float) -> None:
        """Note the coordinator's interval in seconds; 0: it wants no steps."""
        if interval > 0:
            self.interval, self._due_at = interval, 0.0

    def take(self, now: float) -> int | None:
        """Return the step to report now; None if there is no new one, or it is too early.

        Args:
            now: seconds on the monotonic clock.
        """
        if now < self._due_at or (number := _usable()) is None or number == self._reported:
            return None
        self._reported, self._due_at = number, now + self.interval
        return number


def _usable() -> int | None:
    """Return the step if it is usable: no value of a program may disturb its session."""
    if _number is not None and not _on_device(_number):
        with suppress(Exception):
            number = operator.index(_number)
            return number if 0 <= number < 2**63 else None
    return None


def _on_device(number: object) -> bool:
    """Return whether it is a tensor or an array, whose value is on a device."""
    kinds = (
        getattr(sys.modules.get(name), kind, ()) for name, kind in (("torch", "Tensor"), ("jax", "Array"))
    )
    return any(isinstance(number, kind) for kind in kinds)


def _reset() -> None:
    """A forked child has taken no step yet."""
    global _number
    _number = None


os.register_at_fork(after_in_child=_reset)
