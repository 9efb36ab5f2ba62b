"""What the parts of the service say to each other of several coordinators of one state."""

from collections.abc import Callable, Sequence

from muster.v1 import coordinator_pb2

NOT_LEADER_HEADER = "muster-not-leader"
"""In it a client names the leader that it could not reach; empty: it knows of none. A standby that knows no
other one holds the call for a while."""

Replicas = Callable[[], Sequence[coordinator_pb2.Replica]]
"""Tells which coordinators there are of one state."""


def no_replicas() -> Sequence[coordinator_pb2.Replica]:
    """This one is the only one that there can be."""
    return ()
