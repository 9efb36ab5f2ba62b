"""What the engine of etcd does beyond the others: against a real one, with answers that get lost and leaders
that fall."""

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from lab.leaders import TTL, client, take_the_lead
from lab.patience import PATIENCE, until
from lab.processes.etcd import Cluster, cluster, compact
from muster.etcd.v3 import etcd_pb2 as pb
from muster.service.etcd import client as etcd_client
from muster.service.etcd.client import TXN, Connection, Etcd, Method
from muster.service.etcd.errors import EtcdError, UnreachableError
from muster.service.etcd.location import Access, Location
from muster.service.leadership.election import NameTakenError, campaign, enlist
from muster.service.leadership.lease import Lease
from muster.service.leadership.mirror import Mirror
from muster.service.leadership.replica import LeadLost, Replica
from muster.service.storage.engine import LeadLostError, StorageError
from muster.service.storage.etcd import STATE, EtcdEngine
from muster.v1 import state_pb2


@pytest.fixture(scope="module")
def etcd() -> Iterator[Cluster]:
    with cluster() as members:
        yield members


@pytest.fixture
def location(etcd: Cluster, request: pytest.FixtureRequest) -> Location:
    return Location.parse(etcd.state(request.node.name))


class Crash(Exception):
    """The process that wrote is gone."""


class LostError(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the answer got lost"


class Unlucky(Etcd):
    """Loses what the test says of its transactions.

    Args:
        location: where.
        falls_after: the transaction of this number is carried out, and then the process is gone.
        loses: of these transactions the answers get lost.
    """

    def __init__(
        self, location: Location, *, falls_after: int | None = None, loses: frozenset[int] = frozenset()
    ) -> None:
        super().__init__(location.endpoints, Access(), attempt_timeout=PATIENCE / 10)
        self.transactions = 0
        self._falls_after = falls_after
        self._loses = loses

    def _called(
        self,
        connection: Connection,
        method: Method,
        request: Message,
        metadata: etcd_client.Metadata,
        timeout: float,
    ) -> Message:
        answer = super()._called(connection, method, request, metadata, timeout)
        if method is TXN:
            self.transactions += 1
            if self.transactions == self._falls_after:
                raise Crash
            if self.transactions in self._loses:
                raise LostError
        return answer


def engine_of(etcd: Etcd, location: Location) -> EtcdEngine:
    """One that leads, over a client that may be unlucky from now on."""
    with_luck = client(location)
    engine = EtcdEngine(etcd, location, take_the_lead(with_luck, location))
    with_luck.close()
    return engine


def depose(engine: EtcdEngine, location: Location) -> None:
    """What happens when the lease of a leader ends that does not know it."""
    other = client(location)
    other.revoke(engine._lead.lease.id, timeout=PATIENCE)
    other.close()


def successor(location: Location) -> EtcdEngine:
    engine = engine_of(client(location), location)
    engine.open()
    return engine


def rows(engine: EtcdEngine) -> dict[bytes, bytes]:
    return dict(engine.scan())


# ---------------------------------------------------------------------- the fence


def test_who_was_deposed_writes_nothing(location: Location):
    first = engine_of(client(location), location)
    first.open()
    first.commit({b"a": b"1"})
    depose(first, location)
    with pytest.raises(LeadLostError, match="another replica leads"):
        first.commit({b"a": b"2"})
    second = successor(location)
    with pytest.raises(LeadLostError, match="another replica leads"):
        first.commit({b"a": b"3"})
    assert rows(second) == {b"a": b"1"}


def test_a_large_batch_of_who_was_deposed_leaves_nothing(location: Location):
    first = engine_of(client(location), location)
    first.open()
    depose(first, location)
    second = successor(location)
    with pytest.raises(LeadLostError):
        first.commit({b"%d" % number: b"1" for number in range(1_000)})
    assert rows(second) == {}
    assert rows(successor_of(second, location)) == {}


def successor_of(engine: EtcdEngine, location: Location) -> EtcdEngine:
    depose(engine, location)
    return successor(location)


def test_who_may_not_lead_any_more_by_its_own_clock_does_not_even_ask(location: Location):
    engine = engine_of(client(location), location)
    engine.open()
    engine.check_lead()
    engine._lead.lease.validity.end()
    with pytest.raises(LeadLostError, match="is over, or may be"):
        engine.check_lead()
    with pytest.raises(LeadLostError, match="is over, or may be"):
        engine.commit({b"a": b"1"})


# ---------------------------------------------------------------------- lost answers, and crashes


def test_a_change_whose_answer_got_lost_is_made_once(location: Location):
    unlucky = Unlucky(location, loses=frozenset(range(1, 40, 2)))
    engine = engine_of(unlucky, location)
    assert engine.open() == 1
    for number in range(10):
        engine.commit({b"count": b"%d" % number, b"n%d" % number: b""})
    engine.commit({b"%04d" % number: b"1" for number in range(250)})
    found = rows(engine)
    assert found[b"count"] == b"9"
    assert len(found) == 261
    assert rows(successor_of(engine, location)) == found


def test_a_transaction_that_comes_late_does_nothing(location: Location):
    """The first attempt was held up somewhere, and the second one and others after it were carried out."""
    caught: list[pb.TxnRequest] = []

    class Watched(Etcd):
        def txn(self, request: pb.TxnRequest, *, timeout: float) -> pb.TxnResponse:
            caught.append(request)
            return super().txn(request, timeout=timeout)

    watched = Watched(location.endpoints, Access(), attempt_timeout=PATIENCE / 10)
    engine = engine_of(watched, location)
    engine.open()
    engine.commit({b"a": b"old"})
    late = caught[-1]
    engine.commit({b"a": b"new"})
    assert not client(location).txn(late, timeout=PATIENCE).succeeded
    assert rows(engine) == {b"a": b"new"}
    engine.commit({b"b": b"1"})


BEFORE = {b"kept": b"1", b"gone": b"1", b"old/1": b"1", b"old/2": b"1", b"large": b"l" * 1_200_000}
AFTER = {b"kept": b"1", b"old/2": b"2", b"large": b"m" * 600_000, **{b"%04d" % n: b"x" for n in range(300)}}


def change(engine: EtcdEngine) -> None:
    """From BEFORE to AFTER: more than one transaction, and one that clears what it writes."""
    writes = {key: value for key, value in AFTER.items() if BEFORE.get(key) != value}
    engine.commit({**writes, b"gone": None}, [b"old/"])


def test_a_change_of_many_transactions_is_made_whole_or_not_at_all_wherever_its_leader_falls(
    location: Location,
):
    engine = engine_of(client(location), location)
    engine.open()
    engine.commit(BEFORE)
    whole = Unlucky(location)
    depose(engine, location)
    counted = engine_of(whole, location)
    counted.open()
    opening = whole.transactions
    counted.scan()
    assert rows(counted) == BEFORE
    change(counted)
    assert rows(counted) == AFTER
    last = whole.transactions
    assert last - opening > 8
    seen = set()
    engine = counted
    for falls_after in range(opening + 1, last + 1):
        engine = successor_of(engine, location)
        engine.commit(dict.fromkeys(rows(engine)))
        engine.commit(BEFORE)
        depose(engine, location)
        engine = engine_of(Unlucky(location, falls_after=falls_after), location)
        engine.open()
        rows(engine)
        with pytest.raises(Crash):
            change(engine)
        engine = successor_of(engine, location)
        found = rows(engine)
        assert found in (BEFORE, AFTER), f"torn after {falls_after - opening} transactions"
        seen.add(found == AFTER)
        kvs, _ = client(location).snapshot(
            location.prefix + STATE + b"journal", location.prefix + STATE + b"journal~", timeout=PATIENCE
        )
        assert kvs == [], "something of it is left"
    assert seen == {True, False}


def test_who_takes_over_may_fall_as_well(location: Location):
    """A change that counts is carried out by the second, or the third, who comes."""
    engine = engine_of(client(location), location)
    engine.open()
    engine.commit(BEFORE)
    depose(engine, location)
    first = Unlucky(location, falls_after=9)
    engine = engine_of(first, location)
    engine.open()
    rows(engine)
    with pytest.raises(Crash):
        change(engine)
    for falls_after in range(1, 6):
        depose(engine, location)
        engine = engine_of(Unlucky(location, falls_after=falls_after), location)
        with pytest.raises(Crash):
            engine.open()
    assert rows(successor_of(engine, location)) in (BEFORE, AFTER)


# ---------------------------------------------------------------------- whose keys


def test_another_programs_keys_are_not_touched(location: Location):
    etcd = client(location)
    foreign = pb.PutRequest(key=location.prefix + b"theirs", value=b"1")
    etcd.txn(pb.TxnRequest(success=[pb.Operation(put=foreign)]), timeout=PATIENCE)
    with pytest.raises(StorageError, match=r"holds keys that are not Muster's, such as .*theirs"):
        engine_of(etcd, location).open()


def test_a_newer_musters_state_is_not_touched(location: Location):
    engine = engine_of(client(location), location)
    engine.open()
    newer = pb.PutRequest(key=location.prefix + STATE + b"schema", value=b"99")
    client(location).txn(pb.TxnRequest(success=[pb.Operation(put=newer)]), timeout=PATIENCE)
    depose(engine, location)
    with pytest.raises(StorageError, match=r"newer Muster \(schema 99, this one knows 1\)"):
        successor(location)


def test_who_writes_there_besides_is_found_out(location: Location):
    engine = engine_of(client(location), location)
    engine.open()
    put = pb.PutRequest(key=location.prefix + STATE + b"commits", value=b"")
    for _ in range(2):
        client(location).txn(pb.TxnRequest(success=[pb.Operation(put=put)]), timeout=PATIENCE)
    with pytest.raises(StorageError, match="changed by someone who does not lead"):
        engine.commit({b"a": b"1"})


# ---------------------------------------------------------------------- election and mirror


def test_one_leads_and_when_its_lease_ends_another_does(location: Location):
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


def test_two_replicas_with_one_address_are_told_apart(location: Location):
    etcd = client(location)
    record = state_pb2.ReplicaRecord(address="a:1")
    first = Lease(etcd, TTL)
    enlist(etcd, location.prefix, first, record)
    enlist(etcd, location.prefix, first, record)
    with pytest.raises(NameTakenError, match="another replica is reached at a:1"):
        enlist(etcd, location.prefix, Lease(etcd, TTL), record)


def test_a_lease_that_etcd_has_ended_is_lost_and_says_so(location: Location):
    etcd = client(location)
    lease = Lease(etcd, 2)
    lost: list[str] = []
    lease.keep(lost.append)
    etcd.revoke(lease.id, timeout=PATIENCE)
    until(lambda: bool(lost), "the loss is not noticed")
    assert "etcd says that it is over" in lost[0]
    assert not lease.validity.certain


def test_a_lease_is_kept_until_it_is_given_up(location: Location):
    etcd = client(location)
    lease = Lease(etcd, 2)
    granted = lease.validity.now()
    lease.keep(lambda why: pytest.fail(why))
    until(lambda: lease.validity.now() - lease.validity.age > granted, "it is not renewed")
    lease.give_up()
    lease.give_up()
    assert not lease.validity.certain


def test_a_mirror_has_what_was_there_and_what_comes(location: Location):
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


def test_a_mirror_whose_revision_was_compacted_reads_everything_again(etcd: Cluster, location: Location):
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


# ---------------------------------------------------------------------- several members, users


def test_another_member_is_asked_when_one_does_not_answer():
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


def test_a_user_and_a_password(tmp_path):
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


# ---------------------------------------------------------------------- taking part


async def test_who_does_not_hear_that_it_leads_does_not_keep_the_lead_from_everyone(location: Location):
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


async def test_a_leader_whose_lease_ends_hears_of_it(location: Location):
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


async def test_a_standby_whose_lease_ended_while_it_was_stopped_takes_another(location: Location):
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
