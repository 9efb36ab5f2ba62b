"""The fault of a framework's job: which rank it strikes, how, and at which moment of a save."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FAULTY = 3
"""The save at which the fault strikes."""
SAVES = 5
"""Saves of each generation of a job."""
ENDLESS = 100_000
"""Saves of a generation that is killed before its end."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong.

    Args:
        what: ``kill``, ``stop``, or ``raise`` the error of a full disk; or what only one job knows.
        when: ``before`` the save, ``writing``, ``after`` it has written; or a moment that only one job knows.
    """

    what: str
    when: str

    def strike(self) -> None:
        """Kill or stop this process, or raise the error of a full disk."""
        if self.what == "kill":
            time.sleep(0.5)  # The others go on as far as they get.
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        raise OSError(28, "No space left on device")

    def strike_in(self, place: object, method: str, due: Callable[[], bool] = lambda: True) -> None:
        """Strike once in a method: in place of what it does, or ``after`` it.

        Args:
            place: the object, class or module that has the method.
            method: its name.
            due: says in a call whether it is the one.
        """
        theirs: Callable[..., Any] = getattr(place, method)
        strikes = iter([True])

        def ours(*arguments: Any, **named: Any) -> Any:
            # An adapter that wraps the method for one save would give it back as it was: hence no setattr.
            if not (due() and next(strikes, False)):
                return theirs(*arguments, **named)
            written = theirs(*arguments, **named) if self.when == "after" else None
            self.strike()
            return written

        setattr(place, method, ours)
