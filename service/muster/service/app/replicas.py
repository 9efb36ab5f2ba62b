"""All replicas, as one of them knows them."""

from collections.abc import Sequence

from muster.service.leadership.replica import Replica
from muster.v1 import coordinator_pb2


def replicas(replica: Replica) -> Sequence[coordinator_pb2.Replica]:
    """All replicas, as this one knows them."""
    leader = replica.members.leader
    return [
        coordinator_pb2.Replica(
            address=record.address,
            version=record.version,
            started_at=record.started_at,
            leads=leader is not None and record.address == leader.address,
        )
        for record in replica.members.replicas
    ]
