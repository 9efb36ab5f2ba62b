"""Who is there, and who leads: keys that end with the lease of who wrote them."""

from dataclasses import dataclass

from muster.etcd.v3 import etcd_pb2 as pb
from muster.service.etcd.client import CREATE, Etcd
from muster.service.etcd.errors import EtcdError
from muster.service.leadership.lease import Lease
from muster.v1 import state_pb2

CLUSTER = b"cluster/"
"""Behind the prefix, where these keys are."""
LEAD = CLUSTER + b"lead"
"""Who has it decides."""
LEADER = CLUSTER + b"leader"
"""Who has the lead and answers calls: later than the lead, by the time that it takes to read the state."""
REPLICAS = CLUSTER + b"replicas/"


class NameTakenError(EtcdError):
    """Another replica has the address that this one says of itself."""


@dataclass(frozen=True, slots=True)
class Lead:
    """That this process leads, since its key was made, until its lease ends."""

    key: bytes
    revision: int
    """The one that made the key; no other leader's has it."""
    lease: Lease

    def fence(self) -> pb.Compare:
        """What every change must be bound to: that the key stands, and is ours."""
        return pb.Compare(target=CREATE, key=self.key, create_revision=self.revision)

    @property
    def certain(self) -> bool:
        """Whether nobody else can lead yet."""
        return self.lease.validity.certain


def enlist(etcd: Etcd, prefix: bytes, lease: Lease, record: state_pb2.ReplicaRecord) -> None:
    """Say that this replica is there, under the address at which it is reached.

    Raises:
        NameTakenError: another one is there under that address.
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
        None if another one leads.

    Raises:
        EtcdError: etcd refused, or did not answer.
    """
    key = prefix + LEAD
    revision, holder = _create(etcd, key, lease, record)
    return Lead(key, revision, lease) if holder.lease == lease.id else None


def announce(etcd: Etcd, prefix: bytes, lead: Lead, record: state_pb2.ReplicaRecord) -> bool:
    """Say that the leader answers calls from now on.

    Returns:
        Whether it still leads.

    Raises:
        EtcdError: etcd refused, or did not answer.
    """
    put = pb.PutRequest(key=prefix + LEADER, value=record.SerializeToString(), lease=lead.lease.id)
    request = pb.TxnRequest(compare=[lead.fence()], success=[pb.Operation(put=put)])
    return etcd.txn(request, timeout=lead.lease.ttl).succeeded


def _create(etcd: Etcd, key: bytes, lease: Lease, record: state_pb2.ReplicaRecord) -> tuple[int, pb.KeyValue]:
    """Write a key if there is none.

    Returns:
        The revision that made the key that is there, and it itself; it is ours if it has our lease. So
        it is found to be ours, too, if the answer to an earlier attempt got lost.
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
