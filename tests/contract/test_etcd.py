"""The storage engine of etcd, against a real etcd: fence, lost answers, crashes and foreign keys."""

import pytest

from lab.leaders import client
from lab.patience import PATIENCE
from muster.etcd.v3 import etcd_pb2 as pb
from muster.service.etcd.client import Etcd
from muster.service.etcd.location import Access, Location
from muster.service.storage.engine import LeadLostError, StorageError
from muster.service.storage.etcd import STATE, EtcdEngine
from tests.support.faulty_etcd import Crash, FaultyEtcd, engine_of, rows


def depose(engine: EtcdEngine, location: Location) -> None:
    """What happens when the lease of a leader ends that does not know it."""
    other = client(location)
    other.revoke(engine._lead.lease.id, timeout=PATIENCE)
    other.close()


def successor(location: Location) -> EtcdEngine:
    engine = engine_of(client(location), location)
    engine.open()
    return engine


# ---------------------------------------------------------------------- the fence


def test_deposed_leader_writes_nothing(location: Location):
    first = engine_of(client(location), location)
    first.open()
    first.commit({b"a": b"1"})
    depose(first, location)
    with pytest.raises(LeadLostError, match="no longer leads"):
        first.commit({b"a": b"2"})
    second = successor(location)
    with pytest.raises(LeadLostError, match="no longer leads"):
        first.commit({b"a": b"3"})
    assert rows(second) == {b"a": b"1"}


def test_large_batch_of_a_deposed_leader_leaves_nothing(location: Location):
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


def test_replica_with_an_expired_lease_sends_nothing_to_etcd(location: Location):
    engine = engine_of(client(location), location)
    engine.open()
    engine.check_lead()
    engine._lead.lease.validity.end()
    with pytest.raises(LeadLostError, match="is over, or may be"):
        engine.check_lead()
    with pytest.raises(LeadLostError, match="is over, or may be"):
        engine.commit({b"a": b"1"})


# ---------------------------------------------------------------------- lost answers, and crashes


def test_change_with_a_lost_answer_is_made_once(location: Location):
    unlucky = FaultyEtcd(location, loses=frozenset(range(1, 40, 2)))
    engine = engine_of(unlucky, location)
    assert engine.open() == 1
    for number in range(10):
        engine.commit({b"count": b"%d" % number, b"n%d" % number: b""})
    engine.commit({b"%04d" % number: b"1" for number in range(250)})
    found = rows(engine)
    assert found[b"count"] == b"9"
    assert len(found) == 261
    assert rows(successor_of(engine, location)) == found


def test_transaction_that_comes_late_does_nothing(location: Location):
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


def test_change_of_many_transactions_is_atomic_wherever_its_leader_crashes(
    location: Location,
):
    engine = engine_of(client(location), location)
    engine.open()
    engine.commit(BEFORE)
    whole = FaultyEtcd(location)
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
        engine = engine_of(FaultyEtcd(location, falls_after=falls_after), location)
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


def test_journal_survives_crashes_of_later_leaders(location: Location):
    """A complete journal is applied by the second or the third leader."""
    engine = engine_of(client(location), location)
    engine.open()
    engine.commit(BEFORE)
    depose(engine, location)
    first = FaultyEtcd(location, falls_after=9)
    engine = engine_of(first, location)
    engine.open()
    rows(engine)
    with pytest.raises(Crash):
        change(engine)
    for falls_after in range(1, 6):
        depose(engine, location)
        engine = engine_of(FaultyEtcd(location, falls_after=falls_after), location)
        with pytest.raises(Crash):
            engine.open()
    assert rows(successor_of(engine, location)) in (BEFORE, AFTER)


# ---------------------------------------------------------------------- whose keys


def test_engine_refuses_a_prefix_with_foreign_keys(location: Location):
    etcd = client(location)
    foreign = pb.PutRequest(key=location.prefix + b"theirs", value=b"1")
    etcd.txn(pb.TxnRequest(success=[pb.Operation(put=foreign)]), timeout=PATIENCE)
    with pytest.raises(StorageError, match=r"holds keys that are not Muster's, such as .*theirs"):
        engine_of(etcd, location).open()


def test_engine_refuses_the_state_of_a_newer_version(location: Location):
    engine = engine_of(client(location), location)
    engine.open()
    newer = pb.PutRequest(key=location.prefix + STATE + b"schema", value=b"99")
    client(location).txn(pb.TxnRequest(success=[pb.Operation(put=newer)]), timeout=PATIENCE)
    depose(engine, location)
    with pytest.raises(StorageError, match=r"newer Muster \(schema 99, this one knows 1\)"):
        successor(location)


def test_foreign_write_is_detected(location: Location):
    engine = engine_of(client(location), location)
    engine.open()
    put = pb.PutRequest(key=location.prefix + STATE + b"commits", value=b"")
    for _ in range(2):
        client(location).txn(pb.TxnRequest(success=[pb.Operation(put=put)]), timeout=PATIENCE)
    with pytest.raises(StorageError, match="changed by someone who does not lead"):
        engine.commit({b"a": b"1"})
