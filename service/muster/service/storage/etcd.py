"""State in etcd, for several replicas. Only the leader writes.

Every change is one transaction with two conditions. The first is the fence: the key of our lead exists, so
that a deposed leader writes nothing. The second is that the count of commits is the one that we know. So a
transaction may be sent again if its answer got lost, and one that arrives late, after others, does nothing.

Etcd limits the size of a transaction. A larger change is first written to a journal, in several transactions.
One more transaction makes the journal count. From then on the leader, or the next one, applies all of it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from muster.etcd.v3 import etcd_pb2 as pb
from muster.service.etcd.client import VERSION, Etcd
from muster.service.etcd.errors import EtcdError
from muster.service.etcd.location import Location
from muster.service.leadership.election import CLUSTER, Lead
from muster.service.storage.engine import LeadLostError, StorageError, after

STATE = b"state/"
"""These keys begin so, behind the prefix."""
SCHEMA = b"schema"
SCHEMA_VERSION = b"1"
EPOCH = b"epoch"
COMMITS = b"commits"
"""The version of this key, by which etcd counts its writes, is the count of commits."""
JOURNAL = b"journal/"
READY = b"journal-is-whole"
DATA = b"data/"

MAX_OPERATIONS = 100
"""Operations of one transaction; etcd's default limit is 128."""
MAX_BYTES = 1 << 20
"""Bytes of one transaction; etcd's default limit of a request is 1.5 MiB."""
PART_BYTES = 512 * 1024
"""A larger value is stored in several keys."""

Row = tuple[bytes, bytes]


class EtcdEngine:
    """Stores the state under a prefix of etcd, while this replica leads.

    Args:
        etcd: the client.
        location: the state.
        lead: this replica's lead.
        copy: returns the rows behind ``prefix + STATE`` as of a revision or later; default: reads them.
    """

    blocking = True

    def __init__(
        self,
        etcd: Etcd,
        location: Location,
        lead: Lead,
        copy: Callable[[int], Mapping[bytes, bytes]] | None = None,
    ) -> None:
        self.opening_seconds = 0.0
        self._etcd = etcd
        self._location = location
        self._base = location.prefix + STATE
        self._lead = lead
        self._copy = copy or self._read
        self._commits = 0
        self._revision = 0
        self._parts: dict[bytes, int] = {}
        """The number of keys of each value that has more than one."""
        self._most_parts = 1

    # ------------------------------------------------------------------ opening

    def open(self) -> int:
        """See :class:`~muster.service.storage.engine.Engine`."""
        with explained(self._location):
            rows = self._head()
            if rows.get(SCHEMA, SCHEMA_VERSION) != SCHEMA_VERSION:
                raise StorageError(
                    f"{self._location} was written by a newer Muster (schema {rows[SCHEMA].decode()}, this "
                    f"one knows {SCHEMA_VERSION.decode()}). Run that version, or give --state another prefix."
                )
            if SCHEMA not in rows:
                self._check_free()
            self._finish_journal(READY in rows)
            epoch = int(rows.get(EPOCH, b"0")) + 1  # Etcd never returns damaged data.
            began = time.monotonic()
            self._change([self._put(SCHEMA, SCHEMA_VERSION), self._put(EPOCH, str(epoch).encode())])
            self.opening_seconds = time.monotonic() - began
            return epoch

    def _head(self) -> dict[bytes, bytes]:
        """Read the keys that exist once, and the count of commits."""
        looks = [self._look(name) for name in (SCHEMA, EPOCH, READY, COMMITS)]
        done = self._etcd.txn(
            pb.TxnRequest(compare=[self._lead.fence()], success=looks), timeout=self._time_left()
        )
        if not done.succeeded:
            raise self._deposed()
        found = [kv for response in done.responses for kv in response.range.kvs]
        self._commits = next((kv.version for kv in found if kv.key == self._base + COMMITS), 0)
        return {kv.key.removeprefix(self._base): kv.value for kv in found}

    def _check_free(self) -> None:
        """Check that a prefix without a schema has only the keys of replicas."""
        prefix = self._location.prefix
        kvs, _ = self._etcd.snapshot(prefix, after(prefix), timeout=self._time_left())
        others = [kv.key for kv in kvs if not kv.key.startswith(prefix + CLUSTER)]
        if others:
            raise StorageError(
                f"{self._location} holds keys that are not Muster's, such as {others[0]!r}. Give --state "
                "another prefix."
            )

    # ------------------------------------------------------------------ reading

    def raise_epoch(self, epoch: int) -> None:
        """Raise the epoch, so that the next opening has a higher one.

        Raises:
            StorageError: the epoch cannot be written.
        """
        with explained(self._location):
            self._change([self._put(EPOCH, str(epoch).encode())])

    def scan(self) -> Iterator[tuple[bytes, bytes]]:
        """See :class:`~muster.service.storage.engine.Engine`."""
        with explained(self._location):
            rows = self._copy(self._revision)
        whole, self._parts = joined(rows.items())
        self._most_parts = max(self._parts.values(), default=1)
        yield from whole.items()

    def _read(self, _: int) -> dict[bytes, bytes]:
        kvs, _revision = self._etcd.snapshot(self._base, after(self._base), timeout=self._time_left())
        return {kv.key.removeprefix(self._base): kv.value for kv in kvs}

    # ------------------------------------------------------------------ writing

    def check_lead(self) -> None:
        """See :class:`~muster.service.storage.engine.Engine`."""
        if not self._lead.certain:
            raise self._unsure()

    def commit(self, writes: Mapping[bytes, bytes | None], cleared: Sequence[bytes] = ()) -> None:
        """See :class:`~muster.service.storage.engine.Engine`."""
        steps = self._steps(writes, cleared)
        if not steps:
            return
        with explained(self._location):
            if len(steps) == 1:
                self._change(steps[0])
            else:
                self._write_journal(steps)

    def _steps(
        self, writes: Mapping[bytes, bytes | None], cleared: Sequence[bytes]
    ) -> list[list[pb.Operation]]:
        """Split a change into transactions within etcd's limits."""
        steps = _Steps()
        for prefix in cleared:
            for part in range(self._most_parts):
                first = self._key(part, prefix)
                steps.add(pb.Operation(delete=pb.DeleteRequest(key=first, range_end=after(first))))
            for key in [key for key in self._parts if key.startswith(prefix)]:
                del self._parts[key]
        if steps.all and any(
            key.startswith(tuple(cleared)) for key, value in writes.items() if value is not None
        ):
            steps.split()  # Etcd refuses a transaction that deletes and writes one key.
        for key, value in writes.items():
            for operation in self._operations(key, value):
                steps.add(operation)
        return steps.all

    def _operations(self, key: bytes, value: bytes | None) -> Iterator[pb.Operation]:
        had = self._parts.pop(key, 1)
        has = 0 if value is None else max(1, -(-len(value) // PART_BYTES))
        if value is not None:
            for part in range(has):
                piece = value[part * PART_BYTES : (part + 1) * PART_BYTES]
                yield pb.Operation(put=pb.PutRequest(key=self._key(part, key), value=piece))
        for part in range(has, had):
            yield pb.Operation(delete=pb.DeleteRequest(key=self._key(part, key)))
        if has > 1:
            self._parts[key] = has
            self._most_parts = max(self._most_parts, has)

    def _key(self, part: int, key: bytes) -> bytes:
        return self._base + data_key(part, key)

    def _put(self, name: bytes, value: bytes) -> pb.Operation:
        return pb.Operation(put=pb.PutRequest(key=self._base + name, value=value))

    def _look(self, name: bytes) -> pb.Operation:
        return pb.Operation(range=pb.RangeRequest(key=self._base + name))

    def _drop(self, name: bytes, end: bytes = b"") -> pb.Operation:
        end = self._base + end if end else b""
        return pb.Operation(delete=pb.DeleteRequest(key=self._base + name, range_end=end))

    # ------------------------------------------------------------------ the journal

    def _write_journal(self, steps: list[list[pb.Operation]]) -> None:
        for number, step in enumerate(steps):
            data = pb.Operations(operations=step).SerializeToString()
            self._change([self._put(journal_key(number), data)])
        self._change([self._put(READY, str(len(steps)).encode())])
        self._carry_out(steps)

    def _carry_out(self, steps: Iterable[Iterable[pb.Operation]]) -> None:
        for step in steps:
            self._change(list(step))
        self._change([self._drop(READY), self._drop(JOURNAL, after(JOURNAL))])

    def _finish_journal(self, whole: bool) -> None:
        """Apply the previous leader's journal if it is complete, and delete it otherwise."""
        first = self._base + JOURNAL
        kvs, _ = self._etcd.snapshot(first, after(first), timeout=self._time_left())
        if whole:
            self._carry_out(pb.Operations.FromString(kv.value).operations for kv in kvs)
        elif kvs:
            self._change([self._drop(JOURNAL, after(JOURNAL))])

    # ------------------------------------------------------------------ one transaction

    def _change(self, operations: Iterable[pb.Operation]) -> None:
        """Carry out operations exactly once, if we still lead."""
        at = pb.Compare(target=VERSION, key=self._base + COMMITS, version=self._commits)
        request = pb.TxnRequest(
            compare=[self._lead.fence(), at],
            success=[*operations, self._put(COMMITS, b"")],
            failure=[pb.Operation(range=pb.RangeRequest(key=self._lead.key)), self._look(COMMITS)],
        )
        done = self._etcd.txn(request, timeout=self._time_left())
        if not done.succeeded:
            lead, commits = (response.range.kvs for response in done.responses)
            if not lead or lead[0].create_revision != self._lead.revision:
                raise self._deposed()
            if not commits or commits[0].version != self._commits + 1:
                raise StorageError(
                    f"{self._location} was changed by someone who does not lead. Let nothing but Muster "
                    "write there."
                )
            # An earlier attempt was carried out, and its answer got lost.
        self._commits += 1
        self._revision = done.header.revision if done.succeeded else commits[0].mod_revision

    def _time_left(self) -> float:
        left = self._lead.lease.validity.remaining
        if left <= 0:
            raise self._unsure()
        return left

    def _unsure(self) -> LeadLostError:
        return LeadLostError(
            f"this replica's lease in {self._location} is over, or may be: another one may lead."
        )

    def _deposed(self) -> LeadLostError:
        return LeadLostError(
            f"this replica no longer leads {self._location}: what it would write is refused."
        )

    def close(self) -> None:
        """See :class:`~muster.service.storage.engine.Engine`."""


class _Steps:
    """Groups operations so that each group fits into a transaction and into one journal entry."""

    def __init__(self) -> None:
        self.all: list[list[pb.Operation]] = []
        self._bytes = 0
        self._split = True

    def split(self) -> None:
        """Put the next operation into a new group."""
        self._split = True

    def add(self, operation: pb.Operation) -> None:
        size = operation.ByteSize()
        full = self._bytes + size > MAX_BYTES or (self.all and len(self.all[-1]) >= MAX_OPERATIONS)
        if self._split or full:
            self.all.append([])
            self._bytes = 0
            self._split = False
        self.all[-1].append(operation)
        self._bytes += size


def data_key(part: int, key: bytes) -> bytes:
    """Return the key of a part of a value, behind ``STATE``. The part comes first, to keep prefixes."""
    return DATA + part.to_bytes(4, "big") + key


def whole_key(row: bytes) -> bytes | None:
    """Return the key of a value from the row of its first part; None: the row is not a first part."""
    first = data_key(0, b"")
    return row[len(first) :] if row.startswith(first) else None


def journal_key(number: int) -> bytes:
    """Return the key of a journal entry, behind ``STATE``."""
    return JOURNAL + b"%08d" % number


def joined(rows: Iterable[Row]) -> tuple[dict[bytes, bytes], dict[bytes, int]]:
    """Join the rows behind ``STATE`` to whole values.

    Returns:
        Keys with their values; and the number of parts of each value that has several.
    """
    whole: dict[bytes, bytes] = {}
    more: list[Row] = []
    for row, value in rows:
        key = whole_key(row)
        if key is not None:
            whole[key] = value
        elif row.startswith(DATA):
            more.append((row, value))
    parts: dict[bytes, int] = {}
    for row, value in sorted(more):
        key = row[len(data_key(0, b"")) :]
        whole[key] += value
        parts[key] = parts.get(key, 1) + 1
    return whole, parts


@contextmanager
def explained(location: Location) -> Iterator[None]:
    """Raise the errors of etcd as storage errors."""
    try:
        yield
    except EtcdError as error:
        raise StorageError(f"cannot read or write {location}: {error}.") from error
