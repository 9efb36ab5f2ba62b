"""How much of a timeout is over for what has waited with a coordinator before this one."""

COMING_BACK = 3.0
"""Seconds that a timeout leaves for the others who wait to come back as well, so that they are not named as
missing: longer than the SDK pauses between two attempts to connect."""


def elapsed(waited: float, timeout: float) -> float:
    """How much of its timeout is over for what is sent again.

    A timeout that went by while no coordinator was there still leaves ``COMING_BACK``. Each coordinator would
    leave it anew, so beyond twice the timeout nothing is left.

    Args:
        waited: seconds since it was first sent, as its sender says, however much that is.
        timeout: seconds.

    Returns:
        Seconds, from 0 to ``timeout``.
    """
    back = min(COMING_BACK, timeout, max(0.0, 2 * timeout - waited))
    return min(waited, timeout - back)
