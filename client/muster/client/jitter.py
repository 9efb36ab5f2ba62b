"""Random pauses that do not use the training program's random numbers."""

import random

_random = random.Random()


def jittered(seconds: float, least: float, most: float) -> float:
    """Return a random pause, so that many processes do not reconnect at the same time.

    Args:
        seconds: the usual pause.
        least: the smallest factor.
        most: the largest factor.
    """
    return seconds * _random.uniform(least, most)
