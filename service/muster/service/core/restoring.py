"""How a coordinator restores its runs, by invariant 14 (a restart loses nothing acknowledged)."""

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar, cast

from muster.service.core.membership.process import Process
from muster.service.core.registry import Registry
from muster.service.core.retention.retention import Retention
from muster.service.core.run import Run
from muster.service.core.vocabulary.local import LocalCheckpointRecord, RecoveryRecord
from muster.service.core.vocabulary.model import Decision, Instant, MemberState
from muster.service.core.vocabulary.records import (
    AgreementRecord,
    CheckpointsRecord,
    EvictionRecord,
    GroupRecord,
    ParticipantRecord,
    RankOwnerRecord,
    Record,
    RoundRecord,
    RunRecord,
    SaveRecord,
    ShapeRecord,
    StoreKeyRecord,
    StoreOperationRecord,
)

T = TypeVar("T")


class _Records:
    """Records by their kind."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_kind: dict[type, list[Record]] = defaultdict(list)
        for record in records:
            self._by_kind[type(record)].append(record)

    def of(self, kind: type[T]) -> list[T]:
        return cast(list[T], self._by_kind.get(kind, []))


def restore_runs(
    stored: Iterable[Record], runs: dict[str, Run], registry: Registry, retention: Retention, now: Instant
) -> None:
    """Restore all runs.

    Args:
        stored: the records, in any order.
        runs: receives the runs, by id.
        registry: creates them.
        retention: restores when each was last used.
        now: the current time.
    """
    records = _Records(stored)
    for record in records.of(RunRecord):
        run = registry.new(record.run_id, record.generation, now)
        run.restore(record)
        if record.active_at is not None:
            retention.restore(run, record.active_at, now)
        runs[record.run_id] = run
    _restore_rendezvous(records, runs, now)
    for eviction in records.of(EvictionRecord):
        runs[eviction.run_id].evictions[eviction.rank] = eviction
    for group in records.of(GroupRecord):
        runs[group.run_id].restore_group(group.prefix, group.generation, group.first_sequence)
    for decision in sorted(records.of(Decision), key=lambda one: one.sequence):
        runs[decision.run_id].groups[decision.prefix].restore_decision(decision)
    for save in records.of(SaveRecord):
        runs[save.run_id].saving.restore(save, now)
    for checkpoints in records.of(CheckpointsRecord):
        runs[checkpoints.run_id].checkpoints.restore(checkpoints)
    for local in records.of(LocalCheckpointRecord):
        runs[local.run_id].local.restore(local)
    for recovery in records.of(RecoveryRecord):
        runs[recovery.run_id].local.restore_recovery(recovery)
    for shape in records.of(ShapeRecord):
        runs[shape.run_id].groups[shape.prefix].restore_shape(shape)
    for owner in records.of(RankOwnerRecord):
        _restore_owner(runs[owner.run_id], owner, now)
    for key in records.of(StoreKeyRecord):
        runs[key.run_id].store.restore_key(key)
    for operation in sorted(records.of(StoreOperationRecord), key=lambda one: one.order):
        runs[operation.run_id].store.restore_operation(operation)
    for run in runs.values():
        for process in run.roster:
            for one in run.groups.values():
                one.refresh(process.rank)


def _restore_rendezvous(records: _Records, runs: dict[str, Run], now: Instant) -> None:
    rounds: dict[str, list[RoundRecord]] = defaultdict(list)
    for record in records.of(RoundRecord):
        rounds[record.run_id].append(record)
    participants: dict[str, list[ParticipantRecord]] = defaultdict(list)
    for participant in records.of(ParticipantRecord):
        participants[participant.run_id].append(participant)
    for agreement in records.of(AgreementRecord):
        runs[agreement.run_id].rendezvous.agreement.restore(agreement)
    for run_id in rounds.keys() | participants.keys():
        runs[run_id].rendezvous.restore(rounds[run_id], participants[run_id], now)
        runs[run_id].stopping.restore_round()


def _restore_owner(run: Run, record: RankOwnerRecord, now: Instant) -> None:
    group = run.groups[record.prefix]
    if record.membership_start not in (None, group.first_sequence):
        group.restore_former(record)
        return
    process = run.roster.find(record.rank, record.incarnation)
    if process is None:
        unary = record.state is MemberState.IDLE
        process = Process(
            run_id=record.run_id,
            rank=record.rank,
            incarnation=record.incarnation,
            ordinal=record.ordinal,
            lineage=record.lineage,
            host=record.host,
            pid=record.pid,
            node_name=record.node_name or record.host,
            generation=group.generation,
            unary=unary,
            session=None,
            state=MemberState.DISCONNECTED if unary else record.state,
            since=now.monotonic,
        )
        if group.generation == run.generation:
            run.roster.add(process)
    group.restore_owner(process, record.start_sequence, record.shape)
