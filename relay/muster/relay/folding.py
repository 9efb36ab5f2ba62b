"""Joins and arrivals of a node's ranks that wait to be sent to the coordinator together. Pure."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from muster.relay.stats import RelayStats
from muster.v1 import session_pb2 as pb

Item = TypeVar("Item")


@dataclass(slots=True)
class FoldedArrivals:
    """Arrivals at one barrier with the same times."""

    message: pb.Arrive
    ranks: set[int] = field(default_factory=set)


class Fold:
    """Messages of a node's ranks, folded into as few as possible.

    Args:
        stats: counts the folded arrivals.
    """

    def __init__(self, stats: RelayStats) -> None:
        self._stats = stats
        self._joins: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}
        """Ranks by group and shape."""
        self._arrivals: dict[tuple[str, int, int, int, int], FoldedArrivals] = {}
        """By group, sequence and times."""

    def join(self, ranks: Iterable[int], group: pb.JoinGroup) -> None:
        """Add ranks that join a group."""
        key = group.prefix, group.world_size, tuple(group.participants)
        self._joins.setdefault(key, []).extend(ranks)

    def repeats(self, arrive: pb.Arrive, arrivals: Sequence[pb.Arrival]) -> bool:
        """Return whether a rank would be twice in one message; the coordinator refuses such a message."""
        folded = self._arrivals.get(_key(arrive))
        return folded is not None and any(one.rank in folded.ranks for one in arrivals)

    def arrive(self, arrive: pb.Arrive, arrivals: Sequence[pb.Arrival]) -> None:
        """Add arrivals of ranks that :meth:`repeats` does not name."""
        folded = self._arrivals.setdefault(_key(arrive), FoldedArrivals(_without_arrivals(arrive)))
        folded.message.arrivals.extend(arrivals)
        folded.ranks.update(one.rank for one in arrivals)

    def drop(self, rank: int) -> None:
        """Remove the messages of a process, so that they do not count for the next process of its rank."""
        for ranks in self._joins.values():
            ranks[:] = [one for one in ranks if one != rank]
        self._joins = {group: ranks for group, ranks in self._joins.items() if ranks}
        for folded in self._arrivals.values():
            if rank in folded.ranks:
                kept = [one for one in folded.message.arrivals if one.rank != rank]
                del folded.message.arrivals[:]
                folded.message.arrivals.extend(kept)
                folded.ranks.discard(rank)
        self._arrivals = {key: folded for key, folded in self._arrivals.items() if folded.ranks}

    def take(self, max_payload_bytes: int) -> Iterator[pb.ConnectRequest]:
        """Remove and return all messages: joins before the arrivals that may depend on them.

        Args:
            max_payload_bytes: the payload that the coordinator accepts in one message.
        """
        joins, self._joins = self._joins, {}
        for (prefix, world_size, participants), ranks in joins.items():
            group = pb.JoinGroup(
                prefix=prefix, world_size=world_size, participants=participants, ranks=dict.fromkeys(ranks)
            )
            yield pb.ConnectRequest(join_group=group)
        arrivals, self._arrivals = self._arrivals, {}
        for folded in arrivals.values():
            self._stats.folded(len(folded.message.arrivals))
            split = list(batches(folded.message.arrivals, _size, max_payload_bytes))
            for batch in split:
                message = folded.message
                if len(split) > 1:
                    message = _without_arrivals(folded.message)
                    message.arrivals.extend(batch)
                yield pb.ConnectRequest(arrive=message)


def batches(items: Iterable[Item], size: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Split items into lists of at most ``limit`` bytes; each list has at least one item."""
    batch: list[Item] = []
    left = limit
    for item in items:
        needed = size(item)
        if batch and needed > left:
            yield batch
            batch, left = [], limit
        batch.append(item)
        left -= needed
    yield batch


def _key(arrive: pb.Arrive) -> tuple[str, int, int, int, int]:
    times = arrive.timeout_ms, arrive.progress_after_ms, arrive.waited_ms
    return arrive.prefix, arrive.sequence, *times


def _size(arrival: pb.Arrival) -> int:
    return len(arrival.payload) + len(arrival.failure) + arrival.write.ByteSize()


def _without_arrivals(arrive: pb.Arrive) -> pb.Arrive:
    return pb.Arrive(
        prefix=arrive.prefix,
        sequence=arrive.sequence,
        timeout_ms=arrive.timeout_ms,
        progress_after_ms=arrive.progress_after_ms,
        waited_ms=arrive.waited_ms,
    )
