"""Random pauses, which leave the random numbers of the training program as they are."""

import random

_random = random.Random()


def jittered(seconds: float, least: float, most: float) -> float:
    """A pause of about so many seconds, so that many processes do not come back together.

    Args:
        seconds: about how long.
        least: of that, at least this part.
        most: at most this one.
    """
    return seconds * _random.uniform(least, most)
