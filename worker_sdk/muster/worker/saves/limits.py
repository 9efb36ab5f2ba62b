"""What the settings of saves may be."""

import math


def check_timeout(timeout: float) -> None:
    """Refuse a timeout by which no write could end.

    Args:
        timeout: seconds.

    Raises:
        ValueError: it is not a finite number above 0.
    """
    if not (timeout > 0 and math.isfinite(timeout)):
        raise ValueError(f"timeout = {timeout}: it must be a finite number of seconds above 0.")
