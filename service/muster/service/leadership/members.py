"""The replicas that are known at this moment."""

from collections.abc import Callable

from muster.service.etcd.client import Etcd
from muster.service.leadership.election import CLUSTER, LEAD, LEADER, REPLICAS
from muster.service.leadership.mirror import Mirror
from muster.v1 import state_pb2


class Members:
    """The replicas and the leader, followed by a watch.

    Args:
        etcd: the client.
        prefix: the keys of the installation begin so.
        changed: called on another thread whenever the replicas changed, or the connection to etcd did.
    """

    def __init__(self, etcd: Etcd, prefix: bytes, changed: Callable[[], None]) -> None:
        self._mirror = Mirror(etcd, prefix + CLUSTER, changed=changed)

    @property
    def fault(self) -> str:
        """Why this may be outdated; empty if it is up to date."""
        return self._mirror.fault

    @property
    def vacant(self) -> bool:
        """Whether no replica leads, as far as is known."""
        return not self._mirror.fault and LEAD.removeprefix(CLUSTER) not in self._mirror.now

    @property
    def leader(self) -> state_pb2.ReplicaRecord | None:
        """The leader that answers calls; None: no leader does."""
        value = self._mirror.now.get(LEADER.removeprefix(CLUSTER))
        return None if value is None else state_pb2.ReplicaRecord.FromString(value)

    @property
    def replicas(self) -> list[state_pb2.ReplicaRecord]:
        """All replicas, by address."""
        rows = sorted(self._mirror.now.items())
        here = REPLICAS.removeprefix(CLUSTER)
        return [state_pb2.ReplicaRecord.FromString(value) for key, value in rows if key.startswith(here)]

    def close(self) -> None:
        """Stop following."""
        self._mirror.close()
