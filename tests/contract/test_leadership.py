"""Election, leases, mirrors and the client of etcd, against a real etcd."""

import asyncio
from typing import Any

import grpc
import pytest

from lab.leaders import TTL, client
from lab.patience import PATIENCE, until
from lab.processes.etcd import Cluster, cluster, compact
from muster.etcd.v3 import etcd_pb2 as pb
from muster.service.etcd.client import Etcd
from muster.service.etcd.errors import EtcdError, UnreachableError
from muster.service.etcd.location import Access, Location
from muster.service.leadership.election import NameTakenError, campaign, enlist
from muster.service.leadership.lease import Lease
from muster.service.leadership.mirror import Mirror
from muster.service.leadership.replica import LeadLost, Replica
from muster.service.storage.etcd import STATE, EtcdEngine
from muster.v1 import state_pb2
from tests.support.faulty_etcd import engine_of, rows


def test_another_replica_leads_when_the_leaders_lease_ends(location: Location):
    etcd = client(location)
    one, other = Lease(etcd, TTL), Lease(etcd, TTL)
    record = state_pb2.ReplicaRecord(address="a:1")
    lead = campaign(etcd, location.prefix, one, record)
    assert lead is not None
    assert campaign(etcd, location.prefix, one, record) == lead, "an answer got lost, and it asked again"
    assert campaign(etcd, location.prefix, other, record) is None
    one.give_up()
    assert not lead.certain
    later = campaign(etcd, location.prefix, other, record)
    assert later is not None
    assert later.revision > lead.revision


def test_second_replica_with_an_address_is_refused(location: Location):
    etcd = client(location)
    record = state_pb2.ReplicaRecord(address="a:1")
    first = Lease(etcd, TTL)
    enlist(etcd, location.prefix, first, record)
    enlist(etcd, location.prefix, first, record)
    with pytest.raises(NameTakenError, match="another replica is reached at a:1"):
        enlist(etcd, location.prefix, Lease(etcd, TTL), record)


def test_lease_that_etcd_has_ended_is_lost_and_says_so(location: Location):
    etcd = client(location)
    lease = Lease(etcd, 2)
    lost: list[str] = []
    lease.keep(lost.append)
    etcd.revoke(lease.id, timeout=PATIENCE)
    until(lambda: bool(lost), "the loss is not noticed")
    assert "etcd says that it is over" in lost[0]
    assert not lease.validity.certain


def test_lease_is_kept_until_it_is_given_up(location: Location):
    etcd = client(location)
    lease = Lease(etcd, 2)
    granted = lease.validity.now()
    lease.keep(lambda why: pytest.fail(why))
    until(lambda: lease.validity.now() - lease.validity.age > granted, "it is not renewed")
    lease.give_up()
    lease.give_up()
    assert not lease.validity.certain


def test_mirror_has_existing_keys_and_later_changes(location: Location):
    engine = engine_of(client(location), location)
    engine.open()
    engine.commit({b"a": b"1", b"b": b"1"})
    mirror = Mirror(client(location), location.prefix + STATE)
    engine.commit({b"a": b"2", b"b": None, b"large": b"x" * 3_000_000})
    copied = EtcdEngine(
        client(location), location, engine._lead, lambda _: mirror.rows(engine._revision, PATIENCE)
    )
    assert rows(copied) == rows(engine) == {b"a": b"2", b"large": b"x" * 3_000_000}
    mirror.close()


def test_mirror_reads_everything_again_after_its_revision_was_compacted(etcd: Cluster, location: Location):
    engine = engine_of(client(location), location)
    engine.open()
    mirror = Mirror(client(location), location.prefix + STATE)
    mirror.rows(engine._revision, PATIENCE)
    # Cut off, it misses what is compacted meanwhile.
    held = mirror._etcd.endpoints
    mirror._etcd.endpoints = ("127.0.0.1:1",)
    connection = mirror._etcd._connection
    assert connection is not None
    connection.channel.close()
    mirror._etcd._connection = None
    until(lambda: bool(mirror.fault), "it does not notice")
    for number in range(5):
        engine.commit({b"a": b"%d" % number})
    compact(etcd)
    mirror._etcd.endpoints = held
    assert mirror.rows(engine._revision, PATIENCE)[b"data/\0\0\0\0a"] == b"4"
    mirror.close()


def test_client_asks_another_member_when_one_does_not_answer():
    with cluster(3) as members:
        location = Location.parse(members.state("m"))
        engine = engine_of(client(location), location)
        engine.open()
        engine.commit({b"a": b"1"})
        for number, member in enumerate(members.members):
            member.kill()
            engine.commit({b"a": b"%d" % number})
            member.start()
            members.wait()
        assert rows(engine) == {b"a": b"2"}


def test_client_authenticates_with_a_user_and_a_password(tmp_path):
    with cluster() as members:
        admit(members)
        location = Location.parse(members.state("m"))
        password = tmp_path / "password"
        password.write_text("s3cret\n")
        known = Access(user="root", password_file=password)
        etcd = Etcd(location.endpoints, known, attempt_timeout=PATIENCE / 10)
        lease = Lease(etcd, TTL)
        lease.keep(lambda why: pytest.fail(why))
        lead = campaign(etcd, location.prefix, lease, state_pb2.ReplicaRecord())
        assert lead is not None
        engine = EtcdEngine(etcd, location, lead)
        engine.open()
        etcd._token = "over.1"
        engine.commit({b"a": b"1"})
        mirror = Mirror(etcd, location.prefix + STATE)
        assert mirror.rows(engine._revision, PATIENCE)
        # The token is over when the watch must be begun again: etcd says so on a stream that is well.
        etcd._token = "over.2"
        connection = etcd._connection
        assert connection is not None
        etcd._connection = None
        connection.channel.close()
        until(lambda: etcd._token not in (None, "over.2"), "no other token is asked for")
        engine.commit({b"a": b"2"})
        assert mirror.rows(engine._revision, PATIENCE)
        mirror.close()
        with pytest.raises(EtcdError, match="etcd asks for a user"):
            campaign(client(location), location.prefix, lease, state_pb2.ReplicaRecord())
        password.write_text("wrong")
        stranger = Etcd(location.endpoints, known, attempt_timeout=PATIENCE / 10)
        with pytest.raises(EtcdError, match="--etcd-password-file is another one") as caught:
            campaign(stranger, location.prefix, lease, state_pb2.ReplicaRecord())
        assert "wrong" not in str(caught.value)
        lease.give_up()


def admit(members: Cluster) -> None:
    """Make a user root with a password, and ask everyone for one."""
    with grpc.insecure_channel(members.endpoints[0]) as channel:
        # AuthUserAddRequest: name = 1, password = 2. AuthUserGrantRoleRequest: user = 1, role = 2.
        for path, request in (
            ("/etcdserverpb.Auth/UserAdd", text(1, "root") + text(2, "s3cret")),
            ("/etcdserverpb.Auth/RoleAdd", text(1, "root")),
            ("/etcdserverpb.Auth/UserGrantRole", text(1, "root") + text(2, "root")),
            ("/etcdserverpb.Auth/AuthEnable", b""),
        ):
            call: Any = channel.unary_unary(path)
            call(request, timeout=PATIENCE)


def text(number: int, value: str) -> bytes:
    """A field of text, as protobuf puts it."""
    return bytes([number << 3 | 2, len(value)]) + value.encode()


async def test_replica_that_missed_its_election_gives_the_lead_up(location: Location):
    """The key is there with its lease; had it gone on to renew that, nobody would ever lead."""

    class Silent(Etcd):
        transactions = 0

        def txn(self, request: pb.TxnRequest, *, timeout: float) -> pb.TxnResponse:
            answer = super().txn(request, timeout=timeout)
            self.transactions += 1
            if self.transactions == 2:
                raise UnreachableError("no member of etcd answered")
            return answer

    etcd = Silent(location.endpoints, Access(), attempt_timeout=PATIENCE / 10)
    replica = Replica(etcd, location.prefix, state_pb2.ReplicaRecord(address="a:1"), 2)
    async with asyncio.timeout(PATIENCE):
        lead = await replica.elected()
    assert lead.lease.validity.remaining > 0
    assert etcd.transactions > 3
    assert not replica.lost.done()
    await replica.resign()
    assert lead.lease.validity.remaining < 0
    etcd.close()


async def test_leader_hears_that_its_lease_has_ended(location: Location):
    etcd = client(location)
    replica = Replica(etcd, location.prefix, state_pb2.ReplicaRecord(address="a:1"), 2)
    async with asyncio.timeout(PATIENCE):
        lead = await replica.elected()
        other = client(location)
        await asyncio.to_thread(other.revoke, lead.lease.id, timeout=PATIENCE)
        with pytest.raises(LeadLost, match="etcd says that it is over"):
            await replica.lost
    await replica.resign()
    etcd.close()


async def test_standby_takes_a_new_lease_after_a_pause(location: Location):
    class Stopped(Etcd):
        """Hears that the lead is vacant before it hears that its lease is over."""

        grants = 0

        def grant(self, ttl: int, *, timeout: float) -> pb.LeaseGrantResponse:
            granted = super().grant(ttl, timeout=timeout)
            self.grants += 1
            if self.grants == 1:
                self.first = granted.id
            return granted

        def txn(self, request: pb.TxnRequest, *, timeout: float) -> pb.TxnResponse:
            if request.success[0].put.key.endswith(b"cluster/lead") and self.grants == 1:
                self.revoke(self.first, timeout=timeout)
            return super().txn(request, timeout=timeout)

    etcd = Stopped(location.endpoints, Access(), attempt_timeout=PATIENCE / 10)
    replica = Replica(etcd, location.prefix, state_pb2.ReplicaRecord(address="a:1"), TTL)
    async with asyncio.timeout(PATIENCE):
        await replica.elected()
    assert etcd.grants == 2
    await replica.resign()
    etcd.close()
