"""The replicas as they are known at this moment."""

from collections.abc import Callable

from muster.service.etcd.client import Etcd
from muster.service.leadership.election import CLUSTER, LEAD, LEADER, REPLICAS
from muster.service.leadership.mirror import Mirror
from muster.v1 import state_pb2


class Members:
    """Who is there, and who leads.

    Args:
        etcd: the client.
        prefix: what the keys of the installation begin with.
        changed: called on another thread whenever that changed, or is not known any more.
    """

    def __init__(self, etcd: Etcd, prefix: bytes, changed: Callable[[], None]) -> None:
        self._mirror = Mirror(etcd, prefix + CLUSTER, changed=changed)

    @property
    def fault(self) -> str:
        """Why it may be otherwise; empty if it is followed."""
        return self._mirror.fault

    @property
    def vacant(self) -> bool:
        """Whether nobody has the lead, as far as is known."""
        return not self._mirror.fault and LEAD.removeprefix(CLUSTER) not in self._mirror.now

    @property
    def leader(self) -> state_pb2.ReplicaRecord | None:
        """Who leads and answers calls; None: nobody."""
        value = self._mirror.now.get(LEADER.removeprefix(CLUSTER))
        return None if value is None else state_pb2.ReplicaRecord.FromString(value)

    @property
    def replicas(self) -> list[state_pb2.ReplicaRecord]:
        """All that are there, by address."""
        rows = sorted(self._mirror.now.items())
        here = REPLICAS.removeprefix(CLUSTER)
        return [state_pb2.ReplicaRecord.FromString(value) for key, value in rows if key.startswith(here)]

    def close(self) -> None:
        """Follow no longer."""
        self._mirror.close()
