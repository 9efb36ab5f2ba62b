"""How far this process has come in its training, which people see without any barrier."""

import math
import operator
import os
import sys
from contextlib import suppress
from typing import SupportsIndex

LOOK_INTERVAL = 5.0
"""Seconds between two looks at whether there is something to tell, until the coordinator says how often."""

_number: SupportsIndex | None = None


def step(number: SupportsIndex) -> None:
    """Note that this process has come to a training step.

    It costs an assignment. Sessions tell the coordinator every few seconds, if the step has changed, so that
    a job that stands still is seen before its next barrier. A process without a barrier tells nobody.

    Args:
        number: of the step, from 0; all ranks count alike. What is no whole number is not told.
    """
    global _number
    _number = number


class News:
    """What one stream has told of the steps, and when it may tell more."""

    def __init__(self) -> None:
        self.interval = LOOK_INTERVAL
        """Seconds between two messages."""
        self._told: int | None = None
        self._tells_at = math.inf
        """Not before the coordinator has asked for it: one of version 0.1 knows no steps."""

    def welcomed(self, interval: float) -> None:
        """The coordinator says how many seconds must lie between two messages; 0: it wants none."""
        if interval > 0:
            self.interval, self._tells_at = interval, 0.0

    def take(self, now: float) -> int | None:
        """The step that is to be told now; None if there is nothing new, or it is not yet time.

        Args:
            now: on the monotonic clock.
        """
        if now < self._tells_at or (number := _usable()) is None or number == self._told:
            return None
        self._told, self._tells_at = number, now + self.interval
        return number


def _usable() -> int | None:
    """The step, if it is one: what a program notes must not disturb its session, whatever it is."""
    if _number is not None and not _on_device(_number):
        with suppress(Exception):
            number = operator.index(_number)
            return number if 0 <= number < 2**63 else None
    return None


def _on_device(number: object) -> bool:
    """Whether it is a tensor or an array, which would have to be fetched from its device."""
    kinds = (
        getattr(sys.modules.get(name), kind, ()) for name, kind in (("torch", "Tensor"), ("jax", "Array"))
    )
    return any(isinstance(number, kind) for kind in kinds)


def _begin_anew() -> None:
    """A forked child has taken no step yet."""
    global _number
    _number = None


os.register_at_fork(after_in_child=_begin_anew)
