"""Conversion between the core's records and keys with values.

Names have no control characters, so NUL separates the fields of a key. A store key may have any character,
and is the last field for that reason.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError, Message

from muster.service.core.vocabulary.local import (
    Attempt,
    ForgetLocalCheckpoint,
    LocalCheckpointRecord,
    RecoveryRecord,
)
from muster.service.core.vocabulary.model import (
    CheckpointHistory,
    Decision,
    EvictedNode,
    MemberState,
    RendezvousSettings,
    Shape,
)
from muster.service.core.vocabulary.operations import Changed, Done, Flag, Number, Value
from muster.service.core.vocabulary.records import (
    AgreementRecord,
    CheckpointsRecord,
    EvictionRecord,
    Forget,
    ForgetAgreement,
    ForgetDecision,
    ForgetParticipant,
    ForgetRankOwner,
    ForgetRound,
    ForgetRun,
    ForgetShape,
    ForgetStoreKey,
    ForgetStoreOperation,
    GroupRecord,
    ParticipantRecord,
    RankOwnerRecord,
    Record,
    RoundRecord,
    RunRecord,
    SaveRecord,
    ShapeRecord,
    StoredRecord,
    StoreKeyRecord,
    StoreOperationRecord,
)
from muster.service.local_wire import record_from_pb, record_to_pb, recovery_from_pb, recovery_to_pb
from muster.service.rank_lists import RANK_LISTS
from muster.service.storage.engine import StorageError
from muster.service.wire import (
    checkpoint_from_pb,
    checkpoint_to_pb,
    closed_from_pb,
    closed_to_pb,
    decision_from_pb,
    decision_to_pb,
    failed_save_from_pb,
    failed_save_to_pb,
    milliseconds,
    node_from_pb,
    node_to_pb,
    save_from_pb,
    save_record_to_pb,
    settings_from_pb,
    stopped_from_pb,
    stopped_to_pb,
    timestamp_from_pb,
    timestamp_to_pb,
)
from muster.v1 import common_pb2, state_pb2

KINDS = (
    "agreement",
    "checkpoints",
    "decision",
    "eviction",
    "group",
    "local",
    "participant",
    "recovery",
    "round",
    "save",
    "shape",
    "speaker",
    "storekey",
    "storeop",
)
"""The kinds of rows that a run may have beside its own row."""


@dataclass(slots=True)
class Batch:
    """The changes of one commit."""

    writes: dict[bytes, bytes | None] = field(default_factory=dict)
    """Key to value; None deletes."""
    cleared: list[bytes] = field(default_factory=list)
    """Prefixes of keys that are deleted before anything is written."""


def encode_all(records: Iterable[Record]) -> Batch:
    """Encode records as a batch. The last record of a key wins."""
    by_run: dict[str, dict[bytes, bytes | None]] = {}
    batch = Batch()
    for record in records:
        if isinstance(record, ForgetRun):
            # Earlier records of the run in this batch are dropped as well. Later ones start the run again.
            by_run[record.run_id] = {_key("run", record.run_id): None}
            batch.cleared += [_key(kind, record.run_id, "") for kind in KINDS]
        else:
            key, value = encode(record)
            by_run.setdefault(record.run_id, {})[key] = value
    for writes in by_run.values():
        batch.writes.update(writes)
    return batch


def encode(record: StoredRecord | Forget) -> tuple[bytes, bytes | None]:
    """Encode a record as a key and a value; None: delete the key."""
    value = None if isinstance(record, Forget) else _message_of(record).SerializeToString()
    return key_of(record), value


def key_of(record: StoredRecord | Forget) -> bytes:
    """Return the key of a record."""
    match record:
        case Decision() | ForgetDecision():
            return _key("decision", record.run_id, record.prefix, f"{record.sequence:020}")
        case RankOwnerRecord() | ForgetRankOwner():
            return _key("speaker", record.run_id, record.prefix, f"{record.rank:010}")
        case ShapeRecord() | ForgetShape():
            return _key("shape", record.run_id, record.prefix, f"{record.number:010}")
        case GroupRecord():
            return _key("group", record.run_id, record.prefix)
        case RunRecord():
            return _key("run", record.run_id)
        case EvictionRecord():
            return _key("eviction", record.run_id, f"{record.rank:010}")
        case SaveRecord():
            return _key("save", record.run_id, "newest")
        case CheckpointsRecord():
            return _key("checkpoints", record.run_id, "newest")
        case RoundRecord() | ForgetRound():
            return _key("round", record.run_id, f"{record.round:020}")
        case AgreementRecord() | ForgetAgreement():
            return _key("agreement", record.run_id, "newest")
        case ParticipantRecord():
            return _key("participant", record.run_id, record.node.incarnation)
        case ForgetParticipant():
            return _key("participant", record.run_id, record.incarnation)
        case StoreKeyRecord() | ForgetStoreKey():
            return _key("storekey", record.run_id, record.key)
        case StoreOperationRecord() | ForgetStoreOperation():
            return _key("storeop", record.run_id, record.client)
        case LocalCheckpointRecord():
            return _local_key(record.run_id, record.checkpoint.attempt)
        case ForgetLocalCheckpoint():
            return _local_key(record.run_id, record.attempt)
        case RecoveryRecord():
            return _key("recovery", record.run_id, "newest")


def _message_of(record: StoredRecord) -> Message:
    match record:
        case Decision():
            return decision_to_pb(record)
        case RankOwnerRecord():
            return _speaker_to_pb(record)
        case ShapeRecord():
            return state_pb2.ShapeRecord(
                run_id=record.run_id,
                prefix=record.prefix,
                number=record.number,
                world_size=record.shape.world_size,
                participants=record.shape.participants,
            )
        case GroupRecord():
            return state_pb2.GroupRecord(
                run_id=record.run_id,
                prefix=record.prefix,
                generation=record.generation,
                first_sequence=record.first_sequence,
            )
        case RunRecord():
            return state_pb2.RunRecord(
                run_id=record.run_id,
                generation=record.generation,
                closed=closed_to_pb(record.closed) if record.closed is not None else None,
                active_at=timestamp_to_pb(record.active_at) if record.active_at is not None else None,
                stopped=stopped_to_pb(record.stopped) if record.stopped is not None else None,
                evicted_nodes=[
                    state_pb2.EvictedNode(incarnation=i, round=r) for i, r in record.evicted_nodes
                ],
            )
        case EvictionRecord():
            return state_pb2.EvictionRecord(
                run_id=record.run_id,
                rank=record.rank,
                generation=record.generation,
                ordinal=record.ordinal,
            )
        case SaveRecord():
            return save_record_to_pb(record.run_id, record.save)
        case CheckpointsRecord():
            return _checkpoints_to_pb(record)
        case RoundRecord():
            return _round_to_pb(record)
        case ParticipantRecord():
            return _participant_to_pb(record)
        case AgreementRecord():
            return state_pb2.AgreementRecord(run_id=record.run_id, **_settings_to_pb(record.settings))
        case StoreKeyRecord():
            return state_pb2.StoreKeyRecord(run_id=record.run_id, key=record.key, value=record.value)
        case StoreOperationRecord():
            return _operation_to_pb(record)
        case LocalCheckpointRecord():
            return record_to_pb(record)
        case RecoveryRecord():
            return recovery_to_pb(record)


def decode_all(rows: Iterable[tuple[bytes, bytes]]) -> Iterator[StoredRecord]:
    """Decode rows to records.

    Raises:
        StorageError: this version does not write such a row.
    """
    for key, value in rows:
        yield decode(key, value)


def decode(key: bytes, value: bytes) -> StoredRecord:
    """Decode one row to a record.

    Raises:
        StorageError: this version does not write such a row.
    """
    try:
        record = _decode(key, value)
        owner = key_of(record)
        if owner != key:
            raise ValueError(f"its value belongs to {owner!r}")
    except (DecodeError, ValueError, UnicodeDecodeError) as error:
        raise StorageError(
            f"the stored row {key!r} cannot be understood: {error}. It was damaged, or written by "
            "a newer Muster; restore a backup or run that version."
        ) from error
    return record


def _decode(key: bytes, value: bytes) -> StoredRecord:
    match key.split(b"\0", 1)[0]:
        case b"decision":
            return decision_from_pb(common_pb2.Decision.FromString(value))
        case b"speaker":
            return _speaker_from_pb(state_pb2.SpeakerRecord.FromString(value))
        case b"shape":
            kept = state_pb2.ShapeRecord.FromString(value)
            shape = Shape(kept.world_size, RANK_LISTS.shared(kept.participants))
            return ShapeRecord(kept.run_id, kept.prefix, kept.number, shape)
        case b"group":
            group = state_pb2.GroupRecord.FromString(value)
            return GroupRecord(group.run_id, group.prefix, group.generation, group.first_sequence)
        case b"run":
            run = state_pb2.RunRecord.FromString(value)
            closed = closed_from_pb(run.closed) if run.HasField("closed") else None
            active_at = timestamp_from_pb(run.active_at) if run.HasField("active_at") else None
            stopped = stopped_from_pb(run.stopped) if run.HasField("stopped") else None
            evicted = tuple(
                EvictedNode(one.incarnation, one.round if one.HasField("round") else None)
                for one in run.evicted_nodes
            )
            return RunRecord(run.run_id, run.generation, closed, active_at, stopped, evicted)
        case b"eviction":
            eviction = state_pb2.EvictionRecord.FromString(value)
            return EvictionRecord(eviction.run_id, eviction.rank, eviction.generation, eviction.ordinal)
        case b"save":
            save = state_pb2.SaveRecord.FromString(value)
            return SaveRecord(save.run_id, save_from_pb(save))
        case b"checkpoints":
            return _checkpoints_from_pb(state_pb2.CheckpointsRecord.FromString(value))
        case b"round":
            return _round_from_pb(state_pb2.RoundRecord.FromString(value))
        case b"agreement":
            agreement = state_pb2.AgreementRecord.FromString(value)
            return AgreementRecord(agreement.run_id, settings_from_pb(agreement))
        case b"participant":
            return _participant_from_pb(state_pb2.ParticipantRecord.FromString(value))
        case b"storekey":
            entry = state_pb2.StoreKeyRecord.FromString(value)
            return StoreKeyRecord(entry.run_id, entry.key, entry.value)
        case b"storeop":
            return _operation_from_pb(state_pb2.StoreOperationRecord.FromString(value))
        case b"local":
            return record_from_pb(state_pb2.LocalCheckpointRecord.FromString(value))
        case b"recovery":
            return recovery_from_pb(state_pb2.RecoveryRecord.FromString(value))
        case kind:
            raise ValueError(f"no record is called {kind!r}")


def _key(*fields: str) -> bytes:
    return "\0".join(fields).encode()


def _local_key(run_id: str, attempt: Attempt) -> bytes:
    return _key("local", run_id, f"{attempt.generation:020}", f"{attempt.number:020}")


def _speaker_to_pb(record: RankOwnerRecord) -> state_pb2.SpeakerRecord:
    message = state_pb2.SpeakerRecord(
        run_id=record.run_id,
        prefix=record.prefix,
        rank=record.rank,
        incarnation=record.incarnation,
        ordinal=record.ordinal,
        host=record.host,
        node_name=record.node_name,
        pid=record.pid,
        start_sequence=record.start_sequence,
        state=common_pb2.MemberState.ValueType(record.state),
        membership_start=record.membership_start,
        lineage=record.lineage if record.lineage != record.ordinal else 0,
    )
    if isinstance(record.shape, int):
        message.shape = record.shape
    else:
        message.world_size = record.shape.world_size
        message.participants.extend(record.shape.participants)
    return message


def _speaker_from_pb(message: state_pb2.SpeakerRecord) -> RankOwnerRecord:
    return RankOwnerRecord(
        run_id=message.run_id,
        prefix=message.prefix,
        rank=message.rank,
        incarnation=message.incarnation,
        ordinal=message.ordinal,
        host=message.host,
        node_name=message.node_name,
        pid=message.pid,
        start_sequence=message.start_sequence,
        shape=message.shape or Shape(message.world_size, RANK_LISTS.shared(message.participants)),
        state=MemberState(message.state),
        membership_start=message.membership_start if message.HasField("membership_start") else None,
        lineage=message.lineage or message.ordinal,
    )


def _checkpoints_to_pb(record: CheckpointsRecord) -> state_pb2.CheckpointsRecord:
    history = record.history
    return state_pb2.CheckpointsRecord(
        run_id=record.run_id,
        newest=checkpoint_to_pb(history.newest) if history.newest is not None else None,
        committed=history.committed,
        interval_ms=[milliseconds(interval) for interval in history.intervals],
        failures=[failed_save_to_pb(one) for one in history.failures],
    )


def _checkpoints_from_pb(message: state_pb2.CheckpointsRecord) -> CheckpointsRecord:
    history = CheckpointHistory(
        newest=checkpoint_from_pb(message.newest) if message.HasField("newest") else None,
        committed=message.committed,
        intervals=tuple(interval / 1000 for interval in message.interval_ms),
        failures=tuple(failed_save_from_pb(one) for one in message.failures),
    )
    return CheckpointsRecord(message.run_id, history)


def _round_to_pb(record: RoundRecord) -> state_pb2.RoundRecord:
    return state_pb2.RoundRecord(
        run_id=record.run_id,
        round=record.round,
        world_size=record.world_size,
        completed_at=timestamp_to_pb(record.completed_at),
        join_us=max(0, round(record.join_seconds * 1_000_000)),
    )


def _round_from_pb(message: state_pb2.RoundRecord) -> RoundRecord:
    return RoundRecord(
        message.run_id,
        message.round,
        message.world_size,
        timestamp_from_pb(message.completed_at),
        message.join_us / 1_000_000,
    )


def _settings_to_pb(settings: RendezvousSettings) -> dict[str, int]:
    """Return the fields of a message that carries a node's settings."""
    return {
        "min_nodes": settings.min_nodes,
        "max_nodes": settings.max_nodes,
        "join_timeout_ms": milliseconds(settings.join_timeout),
        "last_call_timeout_ms": milliseconds(settings.last_call_timeout),
        "keep_alive_timeout_ms": milliseconds(settings.keep_alive_timeout),
    }


def _participant_to_pb(record: ParticipantRecord) -> state_pb2.ParticipantRecord:
    return state_pb2.ParticipantRecord(
        run_id=record.run_id,
        node=node_to_pb(record.node),
        attempt=record.attempt,
        rank=record.rank,
        lost=record.lost,
        **_settings_to_pb(record.settings),
    )


def _participant_from_pb(message: state_pb2.ParticipantRecord) -> ParticipantRecord:
    return ParticipantRecord(
        message.run_id,
        node_from_pb(message.node),
        message.attempt,
        message.rank,
        settings_from_pb(message),
        message.lost,
    )


def _operation_to_pb(record: StoreOperationRecord) -> state_pb2.StoreOperationRecord:
    message = state_pb2.StoreOperationRecord(
        run_id=record.run_id, client=record.client, number=record.number, order=record.order
    )
    match record.answer:
        case Number(number):
            message.number_answer = number
        case Value(value):
            message.value_answer = value
        case Flag(flag):
            message.flag_answer = flag
    return message


def _operation_from_pb(message: state_pb2.StoreOperationRecord) -> StoreOperationRecord:
    answer: Changed
    match message.WhichOneof("answer"):
        case "number_answer":
            answer = Number(message.number_answer)
        case "value_answer":
            answer = Value(message.value_answer)
        case "flag_answer":
            answer = Flag(message.flag_answer)
        case _:
            answer = Done()
    return StoreOperationRecord(message.run_id, message.client, message.number, answer, message.order)
