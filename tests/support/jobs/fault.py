"""The fault of a framework's job: when it strikes, and how."""

import os
import signal
import time

FAULTY = 3
"""The save at which the fault strikes."""
SAVES = 5
"""Saves of each life of a job."""
ENDLESS = 100_000
"""Saves of a life that is killed before its end."""


def strike(what: str) -> None:
    """Kill or stop this process, or raise the error of a full disk."""
    if what == "kill":
        time.sleep(0.5)  # The others go on as far as they get.
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    raise OSError(28, "No space left on device")
