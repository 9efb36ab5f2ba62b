"""Backups of a state in etcd. They are SQLite files, so that a state can move between etcd and SQLite."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from muster.etcd.v3 import etcd_pb2 as pb
from muster.service.etcd.client import Etcd
from muster.service.etcd.location import Location
from muster.service.leadership.election import Lead, campaign
from muster.service.leadership.lease import Lease
from muster.service.storage import backup
from muster.service.storage.backup import Copy
from muster.service.storage.engine import StorageError, after
from muster.service.storage.etcd import (
    EPOCH,
    JOURNAL,
    READY,
    SCHEMA,
    STATE,
    EtcdEngine,
    explained,
    joined,
)
from muster.v1 import state_pb2

LEASE_TTL = 30
"""Seconds of the lease that keeps replicas from leading during a restore. It is renewed until the end."""
READ_TIMEOUT = 30.0
"""Seconds for each thousand keys."""
RESTORER = "muster restore"
"""The address that the leader's entry shows during a restore."""


def backup_from(etcd: Etcd, location: Location, file: Path, *, force: bool) -> Copy:
    """Copy a state as of one moment. Its replicas may run meanwhile.

    Args:
        etcd: the client.
        location: the state.
        file: the backup; it appears complete or not at all.
        force: whether it may replace another file.

    Raises:
        StorageError: the backup cannot be made.
    """
    base = location.prefix + STATE
    with explained(location):
        kvs, _ = etcd.snapshot(base, after(base), timeout=READ_TIMEOUT)
    rows = with_journal({kv.key.removeprefix(base): kv.value for kv in kvs}, base)
    if SCHEMA not in rows:
        raise StorageError(f"there is no state at {location}. Give --state the one that muster serve has.")
    whole, _ = joined(rows.items())
    return backup.write(whole, int(rows[EPOCH]), file, force=force)


def restore_into(etcd: Etcd, location: Location, file: Path, *, force: bool) -> Copy:
    """Replace a state that no replica leads with a backup.

    The epoch becomes higher than that of both, so that no process takes later events for earlier ones.

    Args:
        etcd: the client.
        location: the state.
        file: the backup, of any kind of state.
        force: whether it may replace an existing state.

    Raises:
        StorageError: the file is not a backup, or the state is in use or exists already.
    """
    rows, epoch = backup.read(file)
    with explained(location), _leading(etcd, location) as lead:
        engine = EtcdEngine(etcd, location, lead)
        there = engine.open()
        present = dict(engine.scan())
        if present and not force:
            raise StorageError(
                f"there is a state at {location}. Give --force to replace it, or another prefix."
            )
        raised = backup.raised_epoch(epoch, there)
        # First, because a higher epoch alone does no harm.
        engine.raise_epoch(raised)
        engine.commit({**dict.fromkeys(present), **rows})
        return Copy(
            runs=sum(key.startswith(backup.RUN_ROWS) for key in rows),
            bytes=file.stat().st_size,
            epoch=raised,
        )


def with_journal(rows: Mapping[bytes, bytes], base: bytes) -> dict[bytes, bytes]:
    """Return rows with their journal applied, if the journal is complete.

    Args:
        rows: keys without the base, with their values.
        base: the begin of all keys.
    """
    done = {key: value for key, value in rows.items() if not key.startswith(JOURNAL)}
    if done.pop(READY, None) is None:
        return done
    for name in sorted(key for key in rows if key.startswith(JOURNAL)):
        for operation in pb.Operations.FromString(rows[name]).operations:
            _carry_out(operation, base, done)
    return done


def _carry_out(operation: pb.Operation, base: bytes, rows: dict[bytes, bytes]) -> None:
    if operation.HasField("put"):
        rows[operation.put.key.removeprefix(base)] = operation.put.value
        return
    first = operation.delete.key.removeprefix(base)
    end = operation.delete.range_end.removeprefix(base) or first + b"\0"
    for key in [key for key in rows if first <= key < end]:
        del rows[key]


@contextmanager
def _leading(etcd: Etcd, location: Location) -> Iterator[Lead]:
    """Lead, so that no replica leads meanwhile.

    Raises:
        StorageError: a replica leads.
    """
    lease = Lease(etcd, LEASE_TTL)
    lease.keep(lambda _: None)
    try:
        lead = campaign(etcd, location.prefix, lease, state_pb2.ReplicaRecord(address=RESTORER))
        if lead is None:
            raise StorageError(f"a replica leads {location}. Stop all replicas first.")
        yield lead
    finally:
        lease.give_up()
