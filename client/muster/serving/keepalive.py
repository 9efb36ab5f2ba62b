"""How a server notices that a peer is silent. gRPC's C core does the work."""

from dataclasses import dataclass

SHORTEST = 1.0
"""Seconds between two pings, and for an answer, at least."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """When a server pings, in seconds."""

    interval: float
    """Without data, until a ping."""
    timeout: float
    """From the ping until the connection ends, if no answer comes."""


def keepalive_within(session_ttl: float, reset_grace: float) -> Keepalive:
    """Return a keepalive so that a silent process is lost when the session TTL is over.

    Its connection ends after ``session_ttl - reset_grace`` seconds of silence, or up to an interval earlier.
    Then the grace begins. If that is less than 2 s, the connection ends after two thirds of the TTL, or 2 s.

    Args:
        session_ttl: seconds of silence after which a process counts as lost.
        reset_grace: seconds that it may take to come back after its connection ended.
    """
    silence = session_ttl - reset_grace
    if silence < 2 * SHORTEST:
        silence = max(2 * SHORTEST, session_ttl * 2 / 3)
    interval = max(SHORTEST, min(session_ttl / 5, silence / 2))
    return Keepalive(interval, max(SHORTEST, silence - interval))
