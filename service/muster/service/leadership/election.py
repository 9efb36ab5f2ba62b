"""The keys of the replicas and of the leader. Each ends with the lease of its writer."""

from dataclasses import dataclass

from muster.etcd.v3 import etcd_pb2 as pb
from muster.service.etcd.client import CREATE, Etcd
from muster.service.etcd.errors import EtcdError
from muster.service.leadership.lease import Lease
from muster.v1 import state_pb2

CLUSTER = b"cluster/"
"""These keys begin so, behind the prefix."""
LEAD = CLUSTER + b"lead"
"""The replica that holds this key decides barriers."""
LEADER = CLUSTER + b"leader"
"""The leader that answers calls. It writes this key later than ``LEAD``, when it has read the state."""
REPLICAS = CLUSTER + b"replicas/"


class NameTakenError(EtcdError):
    """Another replica has the address of this one."""


@dataclass(frozen=True, slots=True)
class Lead:
    """This process's lead: from the creation of its key until the end of its lease."""

    key: bytes
    revision: int
    """The creation revision of the key. It is unique to this lead."""
    lease: Lease

    def fence(self) -> pb.Compare:
        """Return the condition of every change: the key exists and is ours."""
        return pb.Compare(target=CREATE, key=self.key, create_revision=self.revision)

    @property
    def certain(self) -> bool:
        """Whether no other replica can lead yet."""
        return self.lease.validity.certain


def enlist(etcd: Etcd, prefix: bytes, lease: Lease, record: state_pb2.ReplicaRecord) -> None:
    """Enter this replica under its address.

    Raises:
        NameTakenError: another replica has that address.
        EtcdError: etcd refused, or did not answer.
    """
    key = prefix + REPLICAS + record.address.encode()
    _, holder = _create(etcd, key, lease, record)
    if holder.lease != lease.id:
        raise NameTakenError(
            f"another replica is reached at {record.address}, or was until a moment ago. Each needs an "
            "address of its own: give --advertise HOST:PORT"
        )


def campaign(etcd: Etcd, prefix: bytes, lease: Lease, record: state_pb2.ReplicaRecord) -> Lead | None:
    """Try to become the leader.

    Returns:
        None if another replica leads.

    Raises:
        EtcdError: etcd refused, or did not answer.
    """
    key = prefix + LEAD
    revision, holder = _create(etcd, key, lease, record)
    return Lead(key, revision, lease) if holder.lease == lease.id else None


def announce(etcd: Etcd, prefix: bytes, lead: Lead, record: state_pb2.ReplicaRecord) -> bool:
    """Announce that the leader answers calls from now on.

    Returns:
        Whether this replica still leads.

    Raises:
        EtcdError: etcd refused, or did not answer.
    """
    put = pb.PutRequest(key=prefix + LEADER, value=record.SerializeToString(), lease=lead.lease.id)
    request = pb.TxnRequest(compare=[lead.fence()], success=[pb.Operation(put=put)])
    return etcd.txn(request, timeout=lead.lease.ttl).succeeded


def _create(etcd: Etcd, key: bytes, lease: Lease, record: state_pb2.ReplicaRecord) -> tuple[int, pb.KeyValue]:
    """Write a key unless it exists.

    Returns:
        The creation revision of the key, and the key. It is ours if it has our lease, even if the answer to
        an earlier attempt got lost.
    """
    absent = pb.Compare(target=CREATE, key=key, create_revision=0)
    put = pb.PutRequest(key=key, value=record.SerializeToString(), lease=lease.id)
    look = pb.Operation(range=pb.RangeRequest(key=key))
    done = etcd.txn(
        pb.TxnRequest(compare=[absent], success=[pb.Operation(put=put), look], failure=[look]),
        timeout=lease.ttl,
    )
    (found,) = done.responses[-1].range.kvs
    return found.create_revision, found
