"""The disk of a simulated coordinator: its records by key, and checks of what is written."""

import enum
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar, assert_never

from muster.service.core.vocabulary.local import ForgetLocalCheckpoint, LocalCheckpointRecord, RecoveryRecord
from muster.service.core.vocabulary.model import Closed, Decision
from muster.service.core.vocabulary.records import (
    AgreementRecord,
    CheckpointsRecord,
    EvictionRecord,
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

T = TypeVar("T")


class Crash(enum.Enum):
    """When the coordinator dies within a step."""

    BEFORE_PERSIST = enum.auto()
    """The step never happened, and nobody was told."""
    AFTER_PERSIST = enum.auto()
    """It is on disk, and nobody was told."""


class Disk:
    """The records as a storage engine keeps them, by key."""

    def __init__(self) -> None:
        self.kept: dict[tuple[object, ...], StoredRecord] = {}
        self.decided: dict[tuple[str, str], list[Decision]] = {}
        """Every decision that was ever on disk, by group."""
        self.resets: Counter[tuple[str, str]] = Counter()
        """How often each group was created or reset."""
        self.rounds: dict[str, list[RoundRecord]] = {}
        """Every round that was ever on disk, by run."""
        self.places: set[tuple[str, str, int, int]] = set()
        """Every (run, incarnation, attempt, rank) that was ever on disk."""

    def write(self, records: Iterable[Record]) -> None:
        for record in records:
            match record:
                case ForgetRun():
                    self._forget(record.run_id)
                case ForgetShape():
                    self._drop("shape", (ShapeRecord, record.run_id, record.prefix, record.number))
                case ForgetRankOwner():
                    self.kept.pop((RankOwnerRecord, record.run_id, record.prefix, record.rank), None)
                case ForgetDecision():
                    self._drop("decision", (Decision, record.run_id, record.prefix, record.sequence))
                case ForgetRound():
                    self._drop("round", (RoundRecord, record.run_id, record.round))
                case ForgetParticipant():
                    self._drop("node in a round", (ParticipantRecord, record.run_id, record.incarnation))
                case ForgetAgreement():
                    self._drop("agreement", (AgreementRecord, record.run_id))
                case RunRecord():
                    before = self.kept.get((RunRecord, record.run_id))
                    if isinstance(before, RunRecord) and before.closed is not None:
                        assert record.closed == before.closed, "closed is sticky, and the first one counts"
                    self.kept[RunRecord, record.run_id] = record
                case EvictionRecord():
                    self.kept[EvictionRecord, record.run_id, record.rank] = record
                case RoundRecord():
                    self._keep_round(record)
                case AgreementRecord():
                    self.kept[AgreementRecord, record.run_id] = record
                case ParticipantRecord():
                    self.kept[ParticipantRecord, record.run_id, record.node.incarnation] = record
                    self.places.add((record.run_id, record.node.incarnation, record.attempt, record.rank))
                case GroupRecord():
                    self.kept[GroupRecord, record.run_id, record.prefix] = record
                    self.resets[record.run_id, record.prefix] += 1
                case ShapeRecord():
                    self.kept[ShapeRecord, record.run_id, record.prefix, record.number] = record
                case RankOwnerRecord():
                    self.kept[RankOwnerRecord, record.run_id, record.prefix, record.rank] = record
                case SaveRecord():
                    self.kept[SaveRecord, record.run_id] = record
                case LocalCheckpointRecord():
                    self.kept[LocalCheckpointRecord, record.run_id, record.checkpoint.attempt] = record
                case ForgetLocalCheckpoint():
                    self._drop("checkpoint", (LocalCheckpointRecord, record.run_id, record.attempt))
                case RecoveryRecord():
                    self.kept[RecoveryRecord, record.run_id] = record
                case CheckpointsRecord():
                    self.kept[CheckpointsRecord, record.run_id] = record
                case StoreKeyRecord():
                    self.kept[StoreKeyRecord, record.run_id, record.key] = record
                case ForgetStoreKey():
                    del self.kept[StoreKeyRecord, record.run_id, record.key]
                case StoreOperationRecord():
                    self.kept[StoreOperationRecord, record.run_id, record.client] = record
                case ForgetStoreOperation():
                    del self.kept[StoreOperationRecord, record.run_id, record.client]
                case Decision():
                    decided = self.decided.setdefault((record.run_id, record.prefix), [])
                    if record.payloads_dropped:
                        whole = decided[record.sequence]
                        assert record == replace(whole, payloads=(), payloads_dropped=True)
                        self.kept[Decision, record.run_id, record.prefix, record.sequence] = record
                        continue
                    assert record.sequence == len(decided), "sequences have no gaps, and are decided once"
                    decided.append(record)
                    self.kept[Decision, record.run_id, record.prefix, record.sequence] = record
                case _:
                    assert_never(record)

    def _drop(self, what: str, key: tuple[object, ...]) -> None:
        assert key in self.kept, f"a {what} is forgotten that is not kept"
        del self.kept[key]

    def _keep_round(self, record: RoundRecord) -> None:
        rounds = self.rounds.setdefault(record.run_id, [])
        assert not rounds or record.round > rounds[-1].round, "no round is numbered twice"
        run = self.kept.get((RunRecord, record.run_id))
        assert not (isinstance(run, RunRecord) and run.closed), "no round is completed in a closed run"
        rounds.append(record)
        self.kept[RoundRecord, record.run_id, record.round] = record

    def _forget(self, run_id: str) -> None:
        assert (RunRecord, run_id) in self.kept, "a run is forgotten that is not kept"
        self.kept = {key: record for key, record in self.kept.items() if key[1] != run_id}
        self.rounds.pop(run_id, None)
        for group in [group for group in self.decided if group[0] == run_id]:
            del self.decided[group]

    def closed(self, run_id: str) -> Closed | None:
        run = self.kept.get((RunRecord, run_id))
        return run.closed if isinstance(run, RunRecord) else None

    def was_written(self, decision: Decision) -> bool:
        decided = self.decided.get((decision.run_id, decision.prefix), [])
        return decision.sequence < len(decided) and decided[decision.sequence] == decision

    def records(self) -> list[StoredRecord]:
        """All of them, in an order that no engine promises."""
        return list(reversed(self.kept.values()))

    def of_kind(self, kind: type[T]) -> list[T]:
        return [record for record in self.kept.values() if isinstance(record, kind)]
