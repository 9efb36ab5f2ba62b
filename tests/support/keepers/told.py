"""Invariant 22 (copies are verified before use): a level is durable before it is told."""

from collections.abc import Iterable, Mapping

from muster.service.core.vocabulary.effects import Delivery
from muster.service.core.vocabulary.local import Attempt, Level, LocalCheckpointRecord, LocalCommitted, Orders
from muster.service.core.vocabulary.model import SessionId
from muster.service.storage.codec import decode_all


def check_told_levels(
    rows: Mapping[bytes, bytes], deliveries: Iterable[Delivery], commits: Mapping[SessionId, Attempt]
) -> None:
    """Compare the levels in messages, just before they are delivered, with those on the coordinator's disk.

    Args:
        rows: the disk.
        deliveries: the messages.
        commits: the attempts whose level callers wait for.
    """
    told = list(_told_levels(deliveries, commits))
    records = decode_all([row for row in rows.items() if row[0].startswith(b"local\0")] if told else [])
    stored = {one.checkpoint.attempt: one.level for one in records if isinstance(one, LocalCheckpointRecord)}
    for attempt, level in told:
        assert stored.get(attempt) == level, f"{level.name} of {attempt} is told before it is on disk"


def _told_levels(
    deliveries: Iterable[Delivery], commits: Mapping[SessionId, Attempt]
) -> Iterable[tuple[Attempt, Level]]:
    for audience, message in deliveries:
        if isinstance(message, Orders):
            yield from ((one.checkpoint.attempt, one.level) for one in message.checkpoints)
        elif isinstance(message, LocalCommitted):
            yield from ((commits[session], message.level) for session in audience if session in commits)
