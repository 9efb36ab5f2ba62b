"""The key-value store of a run: its keys, the calls that wait for them, and the answers to past changes.

The operations work as in torch's stores, with two differences. A change with an id is carried out once,
however often it is sent, because its number and answer are kept with its writes. And ``add`` refuses a
value that is not a number, where torch reads the digits at its start.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from muster.service.core.timers import WakeUps
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import Effects, Refused
from muster.service.core.vocabulary.limits import ByteTotal, Limits
from muster.service.core.vocabulary.model import Instant, SessionId
from muster.service.core.vocabulary.operations import (
    Add,
    Append,
    Change,
    Changed,
    Check,
    CompareSet,
    Delete,
    DeletePrefix,
    Done,
    Flag,
    Get,
    Keys,
    ListKeys,
    Number,
    NumKeys,
    Operation,
    OperationId,
    Set,
    Value,
    Values,
    Wait,
    Waiting,
)
from muster.service.core.vocabulary.records import (
    ForgetStoreKey,
    ForgetStoreOperation,
    StoreKeyRecord,
    StoreOperationRecord,
)
from muster.service.core.vocabulary.refusal import Reason, Refusal, limit_exceeded

NUMBER = re.compile(rb"[+-]?[0-9]{1,19}")
MIN_NUMBER, MAX_NUMBER = -(2**63), 2**63 - 1
"""The range of ``add``."""
MAX_KEYS_NAMED = 4
"""Keys that a timed-out wait names, because a status must fit in a header."""

ANSWERED_BY: dict[type[Change], type[Changed]] = {
    Set: Done,
    Add: Number,
    CompareSet: Value,
    Append: Done,
    Delete: Flag,
}


@dataclass(slots=True, eq=False)
class Waiter:
    """A call that waits for keys."""

    store: "Store"
    session: SessionId
    operation: Waiting
    watched: int = 0
    """The index of the missing key that it watches."""


KEY_BYTES = 100
"""Memory of a key beyond the bytes of key and value, as measured with tracemalloc."""
ANSWER_BYTES = 200
"""Memory of a kept answer beyond its bytes."""


class Store:
    """The keys of one run.

    Args:
        run_id: the run.
        limits: the coordinator's bounds.
        timers: wakes its waiters.
        total: bytes of all stores of the coordinator: keys, values, kept answers and waiting calls, each
            with its overhead.
    """

    def __init__(self, run_id: str, limits: Limits, timers: WakeUps[Waiter], total: ByteTotal) -> None:
        self.run_id = run_id
        self.values: dict[str, bytes] = {}
        self.bytes = 0
        """Bytes of all keys and values."""
        self.waiters: dict[SessionId, Waiter] = {}
        self._limits = limits
        self._timers = timers
        self._total = total
        self._watchers: dict[str, dict[SessionId, Waiter]] = {}
        """By key. Each waiter watches one key, so that a write looks only at the waiters of its key."""
        self._changes = 0
        """Number of changes with an id, which orders their records."""
        self._last_changes: dict[str, StoreOperationRecord] = {}
        """The last change with an id of each client; the least recent client comes first."""
        self._last_bytes = 0
        self._waiting_bytes = 0
        """Bytes of the keys that waiters name."""

    # ------------------------------------------------------------------ restoring

    def restore_key(self, record: StoreKeyRecord) -> None:
        """Restore a key."""
        self._put(record.key, record.value)

    def restore_operation(self, record: StoreOperationRecord) -> None:
        """Restore a client's last change; the records come in the order of the changes."""
        self._changes = record.order
        self._keep(record)

    def end(self) -> None:
        """Free all bytes and cancel all waits, because the run was removed."""
        for session in list(self.waiters):
            self.forget(session)
        self._total.bytes -= self.bytes + len(self.values) * KEY_BYTES
        self._total.bytes -= self._last_bytes + len(self._last_changes) * ANSWER_BYTES

    # ------------------------------------------------------------------ operations

    def carry_out(self, session: SessionId, operation: Operation, now: Instant, effects: Effects) -> None:
        """Carry out an operation and answer its call. A wait is answered when all its keys exist.

        Raises:
            Refusal: it cannot be carried out, and nothing is changed.
        """
        match operation:
            case Get() | Wait():
                self._wait(session, operation, now, effects)
            case Check():
                effects.send(session, Flag(all(key in self.values for key in operation.keys)))
            case DeletePrefix():
                effects.send(session, Number(self._delete_prefix(operation.prefix, effects)))
            case ListKeys():
                effects.send(session, Keys(tuple(sorted(self.values))))
            case NumKeys():
                effects.send(session, Number(len(self.values)))
            case _:
                effects.send(session, self._change(operation, effects))

    # ------------------------------------------------------------------ changing

    def _change(self, change: Change, effects: Effects) -> Changed:
        answer = self._find_recorded_answer(change)
        if answer is not None:
            return answer
        writes, answer = self._plan(change)
        self._check_room(change, writes, answer)
        for key, value in writes.items():
            if value is None:
                self._remove(key)
                effects.records.append(ForgetStoreKey(self.run_id, key))
            else:
                self._put(key, value)
                effects.records.append(StoreKeyRecord(self.run_id, key, value))
        if change.id is not None:
            self._record_answer(change.id, answer, effects)
        for key in writes:
            self._wake(key, effects)
        return answer

    def _delete_prefix(self, prefix: str, effects: Effects) -> int:
        if not prefix:
            raise Refusal(
                Reason.INVALID_ARGUMENT,
                'prefix = "": it must not be empty, since every key begins so. Name a prefix.',
                field="prefix",
            )
        doomed = [key for key in self.values if key.startswith(prefix)]
        for key in doomed:
            self._remove(key)
            effects.records.append(ForgetStoreKey(self.run_id, key))
        return len(doomed)

    def _plan(self, change: Change) -> tuple[Mapping[str, bytes | None], Changed]:
        """Return what a change writes, with None for a key to remove, and its answer."""
        match change:
            case Set():
                return dict(change.entries), Done()
            case Add():
                total = self._number(change.key) + change.amount
                if not MIN_NUMBER <= total <= MAX_NUMBER:
                    raise self._not_a_number(change.key, f"would become {total}")
                return {change.key: str(total).encode()}, Number(total)
            case CompareSet():
                present = self.values.get(change.key)
                if present == change.expected or (present is None and not change.expected):
                    return {change.key: change.desired}, Value(change.desired)
                return {}, Value(change.expected if present is None else present)
            case Append():
                return {change.key: self.values.get(change.key, b"") + change.value}, Done()
            case Delete():
                existed = change.key in self.values
                return {change.key: None} if existed else {}, Flag(existed)

    def _number(self, key: str) -> int:
        value = self.values.get(key) or b"0"
        if not NUMBER.fullmatch(value):
            raise self._not_a_number(key, f"holds {_quoted(value.decode('utf-8', 'backslashreplace'))}")
        return int(value)

    def _not_a_number(self, key: str, why: str) -> Refusal:
        return Refusal(
            Reason.NOT_A_NUMBER,
            f"cannot add to key {_quoted(key)} of run {self.run_id}: it {why}, and must be a whole number of "
            "64 bits. Use another key, or set this one to a number first.",
        )

    def _put(self, key: str, value: bytes) -> None:
        self._remove(key)
        self.values[key] = value
        self._grow(_size(key, value), 1)

    def _remove(self, key: str) -> None:
        value = self.values.pop(key, None)
        if value is not None:
            self._grow(-_size(key, value), -1)

    def _grow(self, more_bytes: int, more_keys: int) -> None:
        self.bytes += more_bytes
        self._total.bytes += more_bytes + more_keys * KEY_BYTES

    def _check_room(self, change: Change, writes: Mapping[str, bytes | None], answer: Changed) -> None:
        limits = self._limits
        more_keys, more_bytes = 0, 0
        for key, value in writes.items():
            if value is None:
                continue
            self._check_key(key)
            if len(value) > limits.max_store_value_bytes:
                raise limit_exceeded(
                    "max_store_value_bytes",
                    limits.max_store_value_bytes,
                    f"the value of key {_quoted(key)} would have {len(value):,} bytes",
                )
            old = self.values.get(key)
            more_keys += old is None
            more_bytes += _size(key, value) - (0 if old is None else _size(key, old))
        if more_keys > 0 and len(self.values) + more_keys > limits.max_store_keys:
            raise limit_exceeded(
                "max_store_keys",
                limits.max_store_keys,
                f"run {self.run_id} has {len(self.values):,} keys, and {more_keys:,} would be added",
            )
        if more_bytes > 0 and self.bytes + more_bytes > limits.max_store_bytes:
            raise limit_exceeded(
                "max_store_bytes",
                limits.max_store_bytes,
                f"run {self.run_id} has {self.bytes:,} bytes, and {more_bytes:,} would be added",
            )
        frees_room = isinstance(change, Delete) and bool(writes)
        if change.id is not None and not frees_room:
            more_bytes += self._added_answer_bytes(change.id, answer)
        self._check_total(more_bytes + more_keys * KEY_BYTES)

    def _check_total(self, more: int) -> None:
        most = self._limits.max_total_store_bytes
        if more > 0 and self._total.bytes + more > most:
            raise limit_exceeded(
                "max_total_store_bytes",
                most,
                f"all runs hold {self._total.bytes:,} bytes, and {more:,} would be added for run "
                f"{self.run_id}",
            )

    def _check_key(self, key: str) -> None:
        size, most = len(key.encode()), self._limits.max_store_key_bytes
        if size > most:
            raise limit_exceeded("max_store_key_bytes", most, f"key {_quoted(key)} has {size:,} bytes")

    # ------------------------------------------------------------------ changes carried out once

    def _find_recorded_answer(self, change: Change) -> Changed | None:
        """Return the recorded answer of a change that is sent again; None if it is new."""
        last = None if change.id is None else self._last_changes.get(change.id.client)
        if last is None or change.id is None or change.id.number > last.number:
            return None
        if change.id.number < last.number:
            raise Refusal(
                Reason.STALE_OPERATION,
                f"operation {change.id.number} of client {last.client} is over: {last.number} has been "
                "carried out since. Give each operation a higher number than the one before.",
                last=last.number,
            )
        if type(last.answer) is not ANSWERED_BY[type(change)]:
            raise Refusal(
                Reason.INVALID_ARGUMENT,
                f"operation.number = {last.number}: client {last.client} has used it for an operation of "
                "another kind. Give each operation a number of its own.",
                field="operation.number",
            )
        return last.answer

    def _record_answer(self, id: OperationId, answer: Changed, effects: Effects) -> None:
        """Record a change's answer, and forget the least recent clients if that exceeds a bound."""
        self._changes += 1
        record = StoreOperationRecord(self.run_id, id.client, id.number, answer, self._changes)
        self._keep(record)
        effects.records.append(record)
        limits = self._limits
        while len(self._last_changes) > limits.max_store_clients or self._last_bytes > limits.max_store_bytes:
            client = next(iter(self._last_changes))
            self._drop(client)
            effects.records.append(ForgetStoreOperation(self.run_id, client))

    def _added_answer_bytes(self, id: OperationId, answer: Changed) -> int:
        """Return the bytes that this answer needs beyond those of the client's last one."""
        last = self._last_changes.get(id.client)
        kept = StoreOperationRecord(self.run_id, id.client, id.number, answer)
        return _answer_size(kept) + ANSWER_BYTES - (0 if last is None else _answer_size(last) + ANSWER_BYTES)

    def _keep(self, record: StoreOperationRecord) -> None:
        self._drop(record.client)
        self._last_changes[record.client] = record
        self._last_bytes += (size := _answer_size(record))
        self._total.bytes += size + ANSWER_BYTES

    def _drop(self, client: str) -> None:
        record = self._last_changes.pop(client, None)
        if record is not None:
            self._last_bytes -= (size := _answer_size(record))
            self._total.bytes -= size + ANSWER_BYTES

    # ------------------------------------------------------------------ waiting

    def _wait(self, session: SessionId, operation: Waiting, now: Instant, effects: Effects) -> None:
        for key in operation.keys:
            self._check_key(key)
        waiter = Waiter(self, session, operation)
        if self._find_missing(waiter) is None:
            self._answer(waiter, effects)
            return
        if len(self.waiters) >= self._limits.max_store_waits:
            raise limit_exceeded(
                "max_store_waits",
                self._limits.max_store_waits,
                f"{len(self.waiters):,} calls wait for keys of run {self.run_id}",
            )
        size = _keys_size(operation)
        if self._waiting_bytes + size > self._limits.max_store_bytes:
            raise limit_exceeded(
                "max_store_bytes",
                self._limits.max_store_bytes,
                f"calls wait for keys of {self._waiting_bytes:,} bytes in run {self.run_id}, and {size:,} "
                "would be added",
            )
        self._check_total(size)
        self._hold_waiting(size)
        self.waiters[session] = waiter
        self._watch(waiter)
        if operation.timeout:
            self._timers.arm(waiter, now.monotonic + operation.timeout)

    def _hold_waiting(self, more: int) -> None:
        self._waiting_bytes += more
        self._total.bytes += more

    def _find_missing(self, waiter: Waiter) -> str | None:
        """Return the next missing key of a waiter, starting at the one that it watches; else None.

        The search wraps around once. So it looks at each key about once in all, and it finds a key that was
        removed again while the waiter watched another one.
        """
        keys = waiter.operation.keys
        for step in range(len(keys)):
            position = (waiter.watched + step) % len(keys)
            if keys[position] not in self.values:
                waiter.watched = position
                return keys[position]
        return None

    def _watch(self, waiter: Waiter) -> None:
        key = waiter.operation.keys[waiter.watched]
        self._watchers.setdefault(key, {})[waiter.session] = waiter

    def _wake(self, key: str, effects: Effects) -> None:
        if key not in self.values:
            return
        for waiter in self._watchers.pop(key, {}).values():
            if self._find_missing(waiter) is None:
                del self.waiters[waiter.session]
                self._hold_waiting(-_keys_size(waiter.operation))
                self._timers.disarm(waiter)
                self._answer(waiter, effects)
            else:
                self._watch(waiter)

    def _answer(self, waiter: Waiter, effects: Effects) -> None:
        operation = waiter.operation
        if isinstance(operation, Wait):
            effects.send(waiter.session, Done())
            return
        values = tuple(self.values[key] for key in operation.keys)
        size, most = sum(map(len, values)), self._limits.max_store_bytes
        if size > most:
            # One call may name the same key many times.
            refusal = limit_exceeded("max_store_bytes", most, f"the values asked for have {size:,} bytes")
            effects.send(waiter.session, Refused(refusal))
            return
        effects.send(waiter.session, Values(values))

    def forget(self, session: SessionId) -> None:
        """Cancel the wait of a call that has ended."""
        waiter = self.waiters.pop(session, None)
        if waiter is None:
            return
        self._hold_waiting(-_keys_size(waiter.operation))
        self._timers.disarm(waiter)
        key = waiter.operation.keys[waiter.watched]
        del self._watchers[key][session]
        if not self._watchers[key]:
            del self._watchers[key]

    def on_time(self, waiter: Waiter, effects: Effects) -> None:
        """Refuse a waiter whose timeout is over."""
        self.forget(waiter.session)
        operation = waiter.operation
        missing = [key for key in dict.fromkeys(operation.keys) if key not in self.values]
        names = ", ".join(map(_quoted, missing[:MAX_KEYS_NAMED]))
        if len(missing) > MAX_KEYS_NAMED:
            names += f" and {len(missing) - MAX_KEYS_NAMED:,} more"
        refusal = Refusal(
            Reason.STORE_TIMED_OUT,
            f"Wait timeout after {report.seconds(operation.timeout)} for keys of run {self.run_id} "
            f"that nobody set: {names}. Look at the processes that should set them, or wait longer.",
            missing=len(missing),
        )
        effects.send(waiter.session, Refused(refusal))


def _quoted(text: str) -> str:
    """Return a key or value for use in a sentence, with newlines made visible."""
    return f'"{report.shown(text)}"'.replace("\n", r"\n")


def _size(key: str, value: bytes) -> int:
    return len(key.encode()) + len(value)


def _keys_size(operation: Waiting) -> int:
    return sum(len(key.encode()) for key in operation.keys)


def _answer_size(record: StoreOperationRecord) -> int:
    answer = record.answer
    return len(record.client) + (len(answer.value) if isinstance(answer, Value) else 0)
