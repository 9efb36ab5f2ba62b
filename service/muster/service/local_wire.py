"""Local checkpoints, keepers and recoveries as messages, and back."""

from collections.abc import Iterable, Sequence

from muster.service.core.local.views import LocalTierView
from muster.service.core.vocabulary.local import (
    Attachment,
    Attempt,
    CommitLocal,
    ConnectKeeper,
    Disk,
    Holding,
    KeeperInfo,
    Level,
    LocalCheckpoint,
    LocalCheckpointRecord,
    LocalCommitted,
    Location,
    Order,
    Orders,
    Peers,
    Permit,
    Permitted,
    Recover,
    Recovered,
    RecoveryRecord,
    ReportKeeper,
    RequestPermit,
    Transfer,
)
from muster.service.core.vocabulary.model import SessionId
from muster.service.wire import timestamp_from_pb, timestamp_to_pb
from muster.v1 import local_pb2 as pb
from muster.v1 import state_pb2


def attempt_to_pb(attempt: Attempt) -> pb.Attempt:
    """Convert an attempt."""
    return pb.Attempt(generation=attempt.generation, number=max(0, attempt.number))


def attempt_from_pb(message: pb.Attempt) -> Attempt:
    """Convert an attempt back."""
    return Attempt(message.generation, message.number)


def level_to_pb(level: Level) -> pb.DurabilityLevel.ValueType:
    """Convert a level, whose numbers are those of the enum."""
    return pb.DurabilityLevel.ValueType(level)


def level_from_pb(level: int) -> Level:
    """Convert a level back; one that is not given is LOCAL.

    Raises:
        ValueError: there is no such level.
    """
    return Level(level or Level.LOCAL)


def checkpoint_to_pb(one: LocalCheckpoint) -> pb.LocalCheckpoint:
    """Convert a local checkpoint."""
    return pb.LocalCheckpoint(
        attempt=attempt_to_pb(one.attempt),
        step=one.step,
        world_size=one.world_size,
        manifest_size=one.manifest_size,
        manifest_digest=one.manifest_digest,
        replicas=one.replicas,
        persist_to=one.persist_to,
        keep_persisted=one.keep_persisted,
        size=one.size,
    )


def checkpoint_from_pb(message: pb.LocalCheckpoint) -> LocalCheckpoint:
    """Convert a local checkpoint back."""
    return LocalCheckpoint(
        attempt_from_pb(message.attempt),
        message.step,
        message.world_size,
        message.manifest_size,
        message.manifest_digest,
        message.replicas,
        message.persist_to,
        message.keep_persisted,
        message.size,
    )


def keeper_to_pb(info: KeeperInfo) -> pb.Keeper:
    """Convert a keeper's description of itself."""
    return pb.Keeper(
        id=info.id,
        url=info.url,
        failure_domain=info.domain,
        node_name=info.node_name,
        version=info.version,
    )


def holding_to_pb(one: Holding) -> pb.Holding:
    """Convert what a keeper has of a checkpoint."""
    return pb.Holding(
        attempt=attempt_to_pb(one.attempt),
        manifest_digest=one.manifest_digest,
        ranks=sorted(one.ranks),
        persisted_ranks=sorted(one.persisted_ranks),
        persisted_as=one.persisted_as,
    )


# ---------------------------------------------------------------------- requests


def keep_from_pb(session: SessionId, message: pb.KeepRequest, new_token: str) -> ConnectKeeper:
    """Convert the request that opens a keeper's stream."""
    keeper = message.keeper
    return ConnectKeeper(
        session,
        message.run_id,
        KeeperInfo(keeper.id, keeper.url, keeper.failure_domain, keeper.node_name, keeper.version[:64]),
        _holdings(message.holdings),
        Disk(message.disk.used, message.disk.quota),
        new_token,
        _attachment(message.attachment) if message.HasField("attachment") else None,
        _transfers(message.transfers),
    )


def report_from_pb(session: SessionId, message: pb.ReportRequest) -> ReportKeeper:
    """Convert a keeper's report."""
    return ReportKeeper(
        session,
        message.run_id,
        message.keeper_id,
        _holdings(message.holdings),
        message.confirmed,
        _attachment(message.attachment) if message.HasField("attachment") else None,
        Disk(message.disk.used, message.disk.quota) if message.HasField("disk") else None,
        _transfers(message.transfers),
    )


def commit_from_pb(session: SessionId, message: pb.LocalCheckpointServiceCommitRequest) -> CommitLocal:
    """Convert the request that makes a checkpoint.

    Raises:
        ValueError: there is no such level.
    """
    return CommitLocal(
        session,
        message.run_id,
        checkpoint_from_pb(message.checkpoint),
        message.keeper_id,
        level_from_pb(message.wait_for),
        message.persisted_as,
    )


def permit_from_pb(session: SessionId, message: pb.PermitRequest) -> RequestPermit:
    """Convert a keeper's question whether it may commit a checkpoint."""
    return RequestPermit(session, message.run_id, message.keeper_id, attempt_from_pb(message.attempt))


def recover_from_pb(session: SessionId, message: pb.RecoverRequest) -> Recover:
    """Convert the question what to resume from."""
    return Recover(
        session,
        message.run_id,
        message.generation,
        message.number,
        message.world_size,
        tuple(map(attempt_from_pb, message.absent)),
        message.without_local,
    )


def _transfers(messages: Iterable[pb.Transfer]) -> tuple[Transfer, ...]:
    return tuple(Transfer(one.url, one.bytes, one.elapsed_ms / 1000) for one in messages)


def _holdings(messages: Iterable[pb.Holding]) -> tuple[Holding, ...]:
    return tuple(
        Holding(
            attempt_from_pb(one.attempt),
            one.manifest_digest,
            frozenset(one.ranks),
            frozenset(one.persisted_ranks),
            one.persisted_as,
        )
        for one in messages
    )


def _attachment(message: pb.Attachment) -> Attachment:
    return Attachment(message.generation, message.world_size, frozenset(message.ranks), message.replicas)


# ---------------------------------------------------------------------- answers


def keep_response(message: object) -> pb.KeepResponse:
    """Convert a push to a keeper."""
    match message:
        case Peers():
            return pb.KeepResponse(
                peers=pb.Peers(
                    generation=message.generation,
                    token=message.token,
                    keepers=_locations(message.keepers),
                )
            )
        case Orders():
            return pb.KeepResponse(
                orders=pb.Orders(
                    checkpoints=[_order(one) for one in message.checkpoints],
                    forget_before=attempt_to_pb(message.forget_before),
                    confirm=message.confirm,
                )
            )
    raise TypeError(f"not a message to a keeper: {message!r}")


def committed_to_pb(answer: LocalCommitted) -> pb.LocalCheckpointServiceCommitResponse:
    """Convert the level of a checkpoint that was made."""
    return pb.LocalCheckpointServiceCommitResponse(
        level=level_to_pb(answer.level), unsettled=map(checkpoint_to_pb, answer.unsettled)
    )


def permitted_to_pb(answer: Permitted) -> pb.PermitResponse:
    """Convert a permit."""
    return pb.PermitResponse(unsettled=map(checkpoint_to_pb, answer.unsettled))


def recovered_to_pb(answer: Recovered) -> pb.RecoverResponse:
    """Convert a decision on what to resume from."""
    checkpoint = checkpoint_to_pb(answer.checkpoint) if answer.checkpoint is not None else None
    unsettled = map(checkpoint_to_pb, answer.unsettled)
    return pb.RecoverResponse(checkpoint=checkpoint, reason=answer.reason, unsettled=unsettled)


def _order(one: Order) -> pb.Order:
    return pb.Order(
        checkpoint=checkpoint_to_pb(one.checkpoint),
        level=level_to_pb(one.level),
        ranks=one.ranks,
        sources=_locations(one.sources),
        persist=one.persist,
        commit=one.commit,
    )


def _locations(locations: Sequence[Location]) -> list[pb.Location]:
    return [pb.Location(url=one.url, ranks=one.ranks) for one in locations]


def list_response(view: LocalTierView) -> pb.LocalCheckpointServiceListResponse:
    """Convert what people see of local checkpoints."""
    return pb.LocalCheckpointServiceListResponse(
        checkpoints=[
            pb.LocalCheckpointView(
                checkpoint=checkpoint_to_pb(one.checkpoint),
                level=level_to_pb(one.level),
                pending=one.pending,
                missing_ranks=one.missing_ranks,
                only_copies=one.only_copies,
                age_seconds=one.age,
                persisted_as=one.persisted_as,
            )
            for one in view.checkpoints
        ],
        keepers=[
            pb.KeeperView(
                keeper=keeper_to_pb(one.info),
                connected=one.connected,
                ranks=one.ranks,
                copies_to=one.copies_to,
                disk=pb.Disk(used=one.disk.used, quota=one.disk.quota),
                holdings=[holding_to_pb(holding) for holding in one.holdings],
                transfers=[
                    pb.Transfer(
                        url=transfer.url, bytes=transfer.bytes, elapsed_ms=round(transfer.seconds * 1000)
                    )
                    for transfer in one.transfers
                ],
            )
            for one in view.keepers
        ],
        recovery=view.recovery,
    )


# ---------------------------------------------------------------------- records


def record_to_pb(record: LocalCheckpointRecord) -> state_pb2.LocalCheckpointRecord:
    """Convert the record of a local checkpoint."""
    return state_pb2.LocalCheckpointRecord(
        run_id=record.run_id,
        checkpoint=checkpoint_to_pb(record.checkpoint),
        level=level_to_pb(record.level),
        keeper_id=record.keeper_id,
        made_at=timestamp_to_pb(record.made_at),
        persisted_as=record.persisted_as,
        permit=state_pb2.CommitPermit.ValueType(record.permit),
    )


def record_from_pb(message: state_pb2.LocalCheckpointRecord) -> LocalCheckpointRecord:
    """Convert the record of a local checkpoint back."""
    return LocalCheckpointRecord(
        message.run_id,
        checkpoint_from_pb(message.checkpoint),
        level_from_pb(message.level),
        message.keeper_id,
        timestamp_from_pb(message.made_at),
        message.persisted_as,
        Permit(message.permit),
    )


def recovery_to_pb(record: RecoveryRecord) -> state_pb2.RecoveryRecord:
    """Convert the record of a recovery."""
    return state_pb2.RecoveryRecord(
        run_id=record.run_id,
        generation=record.generation,
        number=record.number,
        world_size=record.world_size,
        attempt=attempt_to_pb(record.attempt) if record.attempt is not None else None,
        reason=record.reason,
        newest=attempt_to_pb(record.newest) if record.newest is not None else None,
    )


def recovery_from_pb(message: state_pb2.RecoveryRecord) -> RecoveryRecord:
    """Convert the record of a recovery back."""
    return RecoveryRecord(
        message.run_id,
        message.generation,
        message.number,
        message.world_size,
        attempt_from_pb(message.attempt) if message.HasField("attempt") else None,
        message.reason,
        attempt_from_pb(message.newest) if message.HasField("newest") else None,
    )
