"""The list of all coordinators of one state, and the header of clients that look for the leader."""

from collections.abc import Callable, Sequence

from muster.v1 import coordinator_pb2

Replicas = Callable[[], Sequence[coordinator_pb2.Replica]]
"""Lists the coordinators of one state."""


def no_replicas() -> Sequence[coordinator_pb2.Replica]:
    """Return no replicas: this coordinator cannot have any."""
    return ()
