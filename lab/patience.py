"""How long a test waits for what must happen: for the event itself, and never for a time to have passed."""

import time
from collections.abc import Callable

PATIENCE = 120.0
"""Seconds. Only a test that fails waits for so long, so it is far beyond what a loaded machine takes."""
PACE = 0.02
"""Seconds between two looks at what can only be looked at."""


def until(
    happened: Callable[[], object],
    otherwise: str | Callable[[], str] = "it did not happen",
    *,
    patience: float = PATIENCE,
) -> None:
    """Wait for something that a test can only look at.

    Args:
        happened: says whether it has.
        otherwise: the failure message, or a function that returns it.
        patience: seconds.
    """
    deadline = time.monotonic() + patience
    while not happened():
        if time.monotonic() >= deadline:
            raise AssertionError(otherwise if isinstance(otherwise, str) else otherwise())
        time.sleep(PACE)
