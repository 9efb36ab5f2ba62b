"""Limits how fast bytes are copied, and gives way to the training."""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

BURST_SECONDS = 0.25
"""How long the bytes that may be copied at once take at the limit."""
WEAKEST = 19
"""The nice value of the copying thread."""


class RateLimit:
    """A token bucket.

    Args:
        rate: bytes a second; 0: without limit.
        clock: seconds of a monotonic clock.
        sleep: waits for a number of seconds.
    """

    def __init__(
        self,
        rate: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = rate
        self._clock = clock
        self._sleep = sleep
        self._tokens = rate * BURST_SECONDS
        self._at = clock()

    def take(self, count: int) -> None:
        """Wait until so many bytes may be copied."""
        if not self._rate:
            return
        now = self._clock()
        self._tokens = min(self._tokens + (now - self._at) * self._rate, self._rate * BURST_SECONDS)
        self._at = now
        # A debt is paid by the wait: a piece may be larger than the bucket.
        self._tokens -= count
        if self._tokens < 0:
            self._sleep(-self._tokens / self._rate)


def give_way() -> None:
    """Give the calling thread the weakest claim on the CPU, and on disks only what others leave."""
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, WEAKEST)  # On Linux, it is the thread's own.
        subprocess.run(["ionice", "--class", "3", "--pid", str(thread)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        logger.warning("the copies to shared storage keep their priority: %s", error)
