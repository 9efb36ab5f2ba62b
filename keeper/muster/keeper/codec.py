"""Translates between the messages of ``LocalCheckpointService`` and a keeper's data types."""

from collections.abc import Iterable, Mapping

from muster.checkpoint.committed import SaveAttempt
from muster.checkpoint.manifest import ManifestReference
from muster.keeper.reporting import Report
from muster.keeper.vocabulary import (
    PERSISTED,
    Attachment,
    Holding,
    LocalCheckpoint,
    Location,
    Order,
    Orders,
    Peers,
    Transfer,
)
from muster.v1 import local_pb2 as pb

LEVELS = {
    pb.DURABILITY_LEVEL_LOCAL: "local",
    pb.DURABILITY_LEVEL_REPLICATED: "replicated",
    pb.DURABILITY_LEVEL_PERSISTED: PERSISTED,
}


def orders_from(message: pb.Orders) -> Orders:
    """Read orders."""
    orders = map(_order_from, message.checkpoints)
    by_attempt = {order.checkpoint.attempt: order for order in orders}
    return Orders(by_attempt, _attempt_from(message.forget_before), message.confirm)


def checkpoints_from(messages: Iterable[pb.LocalCheckpoint]) -> list[LocalCheckpoint]:
    """Read checkpoints."""
    return list(map(_checkpoint_from, messages))


def _checkpoint_from(checkpoint: pb.LocalCheckpoint) -> LocalCheckpoint:
    return LocalCheckpoint(
        attempt=_attempt_from(checkpoint.attempt),
        step=checkpoint.step,
        world_size=checkpoint.world_size,
        manifest=ManifestReference(checkpoint.manifest_size, checkpoint.manifest_digest.hex()),
        persist_to=checkpoint.persist_to,
        keep_persisted=checkpoint.keep_persisted,
    )


def _order_from(message: pb.Order) -> Order:
    return Order(
        _checkpoint_from(message.checkpoint),
        LEVELS.get(message.level, ""),
        frozenset(message.ranks),
        _locations_from(message.sources),
        frozenset(message.persist),
        message.commit,
    )


def peers_from(message: pb.Peers) -> Peers:
    """Read the keepers of the run."""
    return Peers(message.token, _locations_from(message.keepers))


def _locations_from(messages: Iterable[pb.Location]) -> tuple[Location, ...]:
    return tuple(Location(one.url.rstrip("/"), frozenset(one.ranks)) for one in messages)


def _attempt_from(message: pb.Attempt) -> SaveAttempt:
    return SaveAttempt(message.generation, message.number)


# ---------------------------------------------------------------------- requests of a keeper


def keep_request(run_id: str, keeper: pb.Keeper, report: Report, protocol_version: int) -> pb.KeepRequest:
    """Return the request that opens a keeper's stream."""
    return pb.KeepRequest(
        run_id=run_id,
        keeper=keeper,
        attachment=_attachment(report.attachment),
        holdings=map(_holding, report.holdings.values()),
        disk=pb.Disk(used=report.used, quota=report.quota),
        protocol_version=protocol_version,
        transfers=_transfers(report.transfers),
    )


def report_request(run_id: str, keeper_id: str, changes: Report, confirmed: int) -> pb.ReportRequest:
    """Return the request that tells what has changed."""
    return pb.ReportRequest(
        run_id=run_id,
        keeper_id=keeper_id,
        attachment=_attachment(changes.attachment),
        holdings=map(_holding, changes.holdings.values()),
        disk=pb.Disk(used=changes.used, quota=changes.quota) if changes.quota else None,
        confirmed=confirmed,
        transfers=_transfers(changes.transfers),
    )


def permit_request(run_id: str, keeper_id: str, attempt: SaveAttempt) -> pb.PermitRequest:
    """Return the question whether a checkpoint may be committed in shared storage."""
    return pb.PermitRequest(
        run_id=run_id,
        keeper_id=keeper_id,
        attempt=pb.Attempt(generation=attempt.generation, number=attempt.number),
    )


def _transfers(transfers: Mapping[str, Transfer]) -> list[pb.Transfer]:
    return [
        pb.Transfer(url=url, bytes=one.bytes, elapsed_ms=round(one.seconds * 1000))
        for url, one in transfers.items()
    ]


def _attachment(attachment: Attachment | None) -> pb.Attachment | None:
    if attachment is None:
        return None
    return pb.Attachment(
        generation=attachment.generation,
        world_size=attachment.world_size,
        ranks=sorted(attachment.ranks),
        replicas=attachment.replicas,
    )


def _holding(holding: Holding) -> pb.Holding:
    return pb.Holding(
        attempt=pb.Attempt(generation=holding.attempt.generation, number=holding.attempt.number),
        manifest_digest=holding.manifest_digest,
        ranks=sorted(holding.ranks),
        persisted_ranks=sorted(holding.persisted_ranks),
        persisted_as=holding.persisted_as,
    )
