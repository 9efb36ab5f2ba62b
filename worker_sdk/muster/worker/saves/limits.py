"""The allowed values of the settings of saves."""

import math


def check_timeout(timeout: float) -> None:
    """Refuse a timeout that is not usable.

    Args:
        timeout: seconds.

    Raises:
        ValueError: it is not a finite number above 0.
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout = {timeout}: it must be a finite number of seconds above 0.")
