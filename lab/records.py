"""Hypothesis makes records of every kind that the core may ask to keep."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from hypothesis import strategies as st

from muster.service.core.vocabulary.local import (
    Attempt,
    Level,
    LocalCheckpoint,
    LocalCheckpointRecord,
    Permit,
    RecoveryRecord,
)
from muster.service.core.vocabulary.model import (
    Checkpoint,
    CheckpointHistory,
    Closed,
    CoveredSave,
    Decision,
    EvictedNode,
    FailedSave,
    Failure,
    HandledNotice,
    MemberState,
    MissingRank,
    MissingState,
    NodeInfo,
    Outcome,
    Ranks,
    RendezvousSettings,
    Save,
    SaveState,
    Shape,
    SlowestWrite,
    Stopped,
)
from muster.service.core.vocabulary.operations import Done, Flag, Number, Value
from muster.service.core.vocabulary.records import (
    AgreementRecord,
    CheckpointsRecord,
    EvictionRecord,
    GroupRecord,
    ParticipantRecord,
    RankOwnerRecord,
    RoundRecord,
    RunRecord,
    SaveRecord,
    ShapeRecord,
    StoreKeyRecord,
    StoreOperationRecord,
)

T = TypeVar("T")


def whole(
    kind: Callable[..., T], *args: st.SearchStrategy[Any], **named: st.SearchStrategy[Any]
) -> st.SearchStrategy[T]:
    """Draw a value of which each field is drawn: else its default hides that a field is not stored.

    Raises:
        TypeError: a field is missing here. Add it.
    """
    every = [*inspect.signature(kind).parameters]
    if missing := set(every[len(args) :]) - named.keys():
        raise TypeError(f"lab/records.py does not draw {sorted(missing)} of {kind}")
    return st.builds(kind, *args, **named)


names = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1, max_size=12)
texts = st.text(st.characters(codec="utf-8"), max_size=30)
ranks = st.integers(0, 65_535)
numbers = st.integers(0, 2**63)
pids = st.integers(0, 2**31 - 1)
seconds = st.floats(0, 1e7)

dates = st.floats(0, 4e9) | st.integers(10**15, 4 * 10**15).map(lambda micros: micros / 1e6)
moments = st.integers(0, 4 * 10**9).map(float)
timeouts = st.integers(1, 2**40).map(lambda millis: millis / 1000)

runs = whole(
    RunRecord,
    names,
    numbers,
    st.none() | whole(Closed, texts, texts, dates),
    st.none() | st.integers(0, 4 * 10**9).map(float),
    st.none() | whole(Stopped, numbers, texts, texts, moments, numbers),
    st.lists(whole(EvictedNode, names, st.none() | numbers), max_size=3).map(tuple),
)
evictions = whole(EvictionRecord, names, ranks, numbers, st.integers(0, 2**62))
rounds = whole(RoundRecord, names, numbers, st.integers(1, 65_536), dates, seconds)
round_settings = whole(
    RendezvousSettings,
    min_nodes=ranks,
    max_nodes=ranks,
    join_timeout=timeouts,
    last_call_timeout=timeouts,
    keep_alive_timeout=timeouts,
)
participants = whole(
    ParticipantRecord,
    run_id=names,
    node=whole(NodeInfo, names, names, pids, texts),
    attempt=numbers,
    rank=ranks,
    settings=round_settings,
    lost=st.booleans(),
)
agreements = whole(AgreementRecord, names, round_settings)
groups = whole(GroupRecord, names, names, numbers, numbers)
shapes = st.integers(1, 65_536).flatmap(
    lambda size: whole(
        Shape,
        st.just(size),
        st.sets(st.integers(0, size - 1), max_size=10).map(lambda some: Ranks(sorted(some))),
    )
)
speakers = whole(
    RankOwnerRecord,
    run_id=names,
    prefix=names,
    rank=ranks,
    incarnation=names,
    ordinal=st.integers(0, 2**62),
    host=names,
    pid=pids,
    start_sequence=numbers,
    shape=shapes | st.integers(1, 2**32 - 1),
    state=st.sampled_from(MemberState),
    lineage=st.integers(1, 2**62),
    membership_start=st.none() | numbers,
    node_name=texts,
)
shape_records = whole(ShapeRecord, names, names, st.integers(1, 2**32 - 1), shapes)
missing_ranks = whole(
    MissingRank,
    rank=ranks,
    state=st.sampled_from(MissingState),
    host=texts,
    pid=pids,
    gone_for=seconds,
    last_sequence=st.none() | numbers,
    doing=texts,
)
decisions = whole(
    Decision,
    run_id=names,
    prefix=names,
    sequence=numbers,
    generation=numbers,
    outcome=st.sampled_from(Outcome),
    message=texts,
    missing=st.lists(missing_ranks, max_size=3).map(tuple),
    arrived=ranks,
    required=ranks,
    payloads=st.lists(st.tuples(ranks, st.binary(max_size=20)), max_size=3).map(tuple),
    failures=st.lists(whole(Failure, ranks, texts, pids, texts), max_size=3).map(tuple),
    decided_at=dates,
    wait=seconds,
    skew=seconds,
    last_arrival_rank=st.none() | ranks,
    payloads_dropped=st.booleans(),
)
saves = whole(
    SaveRecord,
    names,
    whole(
        Save,
        number=numbers,
        state=st.sampled_from(SaveState),
        stop=st.booleans(),
        by=texts,
        reason=texts,
        asked_at=moments,
        since=numbers,
        step=st.none() | numbers,
        ended_at=st.none() | moments,
        generation=numbers,
        across_generations=st.booleans(),
        covered=st.none() | whole(CoveredSave, texts, texts, st.none() | moments),
        deadline=st.none() | moments,
        late=texts,
        notices=st.lists(whole(HandledNotice, names, numbers), max_size=3).map(tuple),
    ),
)
checkpoints = whole(
    CheckpointsRecord,
    names,
    whole(
        CheckpointHistory,
        newest=st.none()
        | whole(
            Checkpoint,
            step=st.none() | numbers,
            committed_at=moments,
            bytes=st.none() | numbers,
            slowest=st.none() | whole(SlowestWrite, ranks, texts, timeouts),
            prefix=names,
            sequence=numbers,
        ),
        committed=numbers,
        intervals=st.lists(timeouts, max_size=5).map(tuple),
        failures=st.lists(
            whole(FailedSave, st.none() | numbers, moments, texts, names, numbers), max_size=5
        ).map(tuple),
    ),
)
store_keys = whole(StoreKeyRecord, names, texts, st.binary(max_size=20))
changed = (
    whole(Done)
    | whole(Flag, st.booleans())
    | whole(Number, st.integers(-(2**63), 2**63 - 1))
    | whole(Value, st.binary(max_size=20))
)
store_operations = whole(StoreOperationRecord, names, names, numbers, changed, numbers)
attempts = whole(Attempt, numbers, numbers)
local_checkpoints = whole(
    LocalCheckpointRecord,
    run_id=names,
    checkpoint=whole(
        LocalCheckpoint,
        attempt=attempts,
        step=numbers,
        world_size=st.integers(1, 65_536),
        manifest_size=numbers,
        manifest_digest=st.binary(min_size=16, max_size=16),
        replicas=ranks,
        persist_to=texts,
        keep_persisted=ranks,
        size=numbers,
    ),
    level=st.sampled_from(Level),
    keeper_id=texts,
    made_at=moments,
    persisted_as=texts,
    permit=st.sampled_from(Permit),
)
recoveries = whole(
    RecoveryRecord,
    run_id=names,
    generation=numbers,
    number=numbers,
    world_size=st.integers(1, 65_536),
    attempt=st.none() | attempts,
    reason=texts,
    newest=st.none() | attempts,
)
every_kind = st.tuples(
    runs,
    agreements,
    local_checkpoints,
    recoveries,
    groups,
    shape_records,
    speakers,
    decisions,
    evictions,
    rounds,
    participants,
    saves,
    checkpoints,
    store_keys,
    store_operations,
)
"""One record of each kind."""


def decision(**changed: object) -> Decision:
    """A decision with every field set, but for what is changed."""
    fields: dict[str, object] = {
        "run_id": "job1",
        "prefix": "checkpoint",
        "sequence": 7,
        "generation": 3,
        "outcome": Outcome.TIMED_OUT,
        "message": 'barrier "checkpoint" #7 of run job1 timed out',
        "missing": (MissingRank(3, MissingState.CONNECTION_LOST, "node-0", 4121, 41.5, 6),),
        "arrived": 14,
        "required": 16,
        "payloads": ((0, b"\0\xff"), (2, b"two")),
        "failures": (Failure(1, "node-1", 77, "disk full"),),
        "decided_at": 1_700_000_000.123457,
        "wait": 12.5,
        "skew": 0.25,
        "last_arrival_rank": 0,
        "payloads_dropped": True,
    }
    return Decision(**(fields | changed))  # type: ignore[arg-type]


def timeless(value: object) -> object:
    """Every field of a record but its times, which are stored rounded."""
    if is_dataclass(value):
        return type(value), [timeless(getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, tuple):
        return type(value), [timeless(one) for one in value]
    return None if isinstance(value, float) else value


def times(value: object) -> list[float]:
    """The times in a record."""
    if is_dataclass(value):
        return [time for field in fields(value) for time in times(getattr(value, field.name))]
    if isinstance(value, tuple):
        return [time for one in value for time in times(one)]
    return [value] if isinstance(value, float) else []
