"""The only module of the service that reads a clock."""

import time
from typing import Protocol

from muster.service.core.vocabulary.model import Instant


class Clock(Protocol):
    """Tells the driver the time."""

    def now(self) -> Instant:
        """Return the present time."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> Instant:
        """Return the present time."""
        return Instant(time.monotonic(), time.time())
