"""The part of a timeout that passed before this coordinator started."""

RECONNECT_GRACE = 3.0
"""Seconds that waiting ranks get to reconnect after a restart, so that no report names them as missing. It
is longer than the pause between two connection attempts of the SDK."""


def elapsed(waited: float, timeout: float) -> float:
    """Return how much of the timeout of a repeated message has passed.

    If the timeout ended while no coordinator was there, ``RECONNECT_GRACE`` is left. Every restarted
    coordinator would grant it again, so nothing is left beyond twice the timeout.

    Args:
        waited: seconds since the message was first sent, by its sender's clock; may exceed ``timeout``.
        timeout: seconds.

    Returns:
        Seconds, from 0 to ``timeout``.
    """
    grace = min(RECONNECT_GRACE, timeout, max(0.0, 2 * timeout - waited))
    return min(waited, timeout - grace)
