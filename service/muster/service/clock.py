"""The one place where the service reads a clock."""

import time
from typing import Protocol

from muster.service.core.vocabulary.model import Instant


class Clock(Protocol):
    """Where the driver takes the time from."""

    def now(self) -> Instant:
        """This moment."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> Instant:
        """This moment."""
        return Instant(time.monotonic(), time.time())
