"""The processes that own the ranks of a group: one process arrives for each rank."""

from dataclasses import dataclass, replace

from muster.service.core.barriers import refusals
from muster.service.core.barriers.shapes import Shapes
from muster.service.core.membership.process import Process
from muster.service.core.membership.roster import Roster
from muster.service.core.vocabulary.effects import Effects
from muster.service.core.vocabulary.model import MemberState, Shape
from muster.service.core.vocabulary.records import ForgetRankOwner, RankOwnerRecord


@dataclass(slots=True, eq=False)
class RankOwner:
    """The process that arrives for a rank in a group."""

    process: Process
    start: int
    """The first sequence that it may arrive at."""
    shape: Shape
    last: int | None = None
    """The last sequence that it arrived at, as far as the coordinator knows."""
    refused: int = 0
    """The last sequence at which its arrival was refused. It has heard all decisions before that one."""
    counted_as_living: bool = False
    """Whether its shape counts among the shapes of living owners."""


class RankOwners:
    """The owner of each rank of one group, and the former owners that may still miss the newest release.

    Args:
        run_id: the run.
        prefix: the group's name within it.
        roster: the run's processes.
    """

    def __init__(self, run_id: str, prefix: str, roster: Roster) -> None:
        self.by_rank: dict[int, RankOwner] = {}
        self.former: dict[int, RankOwnerRecord] = {}
        """By rank: an owner from before the last reset that arrived at the newest release. It may not have
        heard that release yet. A newer process of the rank takes its place."""
        self.gone_ranks: set[int] = set()
        """Ranks for which no process is left to arrive."""
        self.shapes = Shapes(run_id, prefix)
        """The shapes of the owners. Living owners disagree if they brought more than one."""
        self._run_id = run_id
        self._prefix = prefix
        self._roster = roster
        self.refresh_all()

    def check(self, process: Process, shape: Shape) -> None:
        """Refuse a process that may not own its rank.

        Raises:
            Refusal: SHAPE_CHANGED or SUPERSEDED.
        """
        owner = self.by_rank.get(process.rank)
        if owner is None:
            former = self.former.get(process.rank)
            if former is not None and former.ordinal > process.ordinal:
                raise refusals.superseded(self._run_id, self._prefix, process, former)
            return
        if owner.process is process and owner.shape != shape:
            raise refusals.shape_changed(self._prefix, process, owner.shape, shape)
        if owner.process.ordinal > process.ordinal:
            raise refusals.superseded(self._run_id, self._prefix, process, owner.process)

    def add(
        self,
        process: Process,
        start: int,
        shape: Shape,
        last: int | None,
        first_sequence: int,
        effects: Effects,
    ) -> None:
        """Let a process own its rank.

        Args:
            process: the process.
            start: the first sequence that it may arrive at.
            shape: the shape that it brings.
            last: the last sequence that it arrived at; None if it arrived at none.
            first_sequence: the first sequence of the group's membership.
            effects: receives its record.
        """
        self.former.pop(process.rank, None)
        older = self.by_rank.get(process.rank)
        owner = RankOwner(process, start, self.shapes.add(shape), last)
        if older is not None:
            self._remove(older, effects)
        self.by_rank[process.rank] = owner
        process.prefixes.add(self._prefix)
        self.record(owner, first_sequence, effects)
        self.refresh(process.rank)

    def _remove(self, owner: RankOwner, effects: Effects) -> None:
        owner.process.prefixes.discard(self._prefix)
        if owner.counted_as_living:
            self.shapes.count_living(owner.shape, -1)
        self.shapes.remove(owner.shape, effects)

    def restore(self, process: Process, start: int, shape: Shape | int, released: int | None) -> None:
        """Restore an owner from its record, after the shapes.

        Args:
            process: the process.
            start: the first sequence that it may arrive at.
            shape: the shape, or the number of its record.
            released: the newest release of the generation, if there is one.

        Raises:
            KeyError: the shape has no record.
        """
        last = released if released is not None and start <= released else None
        self.by_rank[process.rank] = RankOwner(process, start, self.shapes.restored(shape), last)
        process.prefixes.add(self._prefix)

    def lineage(self, rank: int) -> int | None:
        """Return the lineage of the last owner of a rank; None if the rank had no owner."""
        owner = self.by_rank.get(rank)
        last = owner.process if owner is not None else self.former.get(rank)
        return last.lineage if last is not None else None

    @property
    def all_gone(self) -> bool:
        """Whether there are owners, and none of them is living."""
        return bool(self.by_rank) and not self.shapes.any_living

    def find_disagreeing(self, owner: RankOwner, arrived: dict[int, Process]) -> RankOwner | None:
        """Return an owner with another shape; it is living, or its arrival counts."""
        for other in self.by_rank.values():
            counts = other.counted_as_living or arrived.get(other.process.rank) is other.process
            if counts and other.shape is not owner.shape:
                return other
        return None

    def refresh(self, rank: int) -> None:
        """Update what the group knows of a rank after one of its processes changed."""
        owner = self.by_rank.get(rank)
        if owner is not None and owner.counted_as_living != owner.process.state.living:
            owner.counted_as_living = not owner.counted_as_living
            self.shapes.count_living(owner.shape, 1 if owner.counted_as_living else -1)
        if self._roster.is_gone(rank, owner.process if owner else None):
            self.gone_ranks.add(rank)
        else:
            self.gone_ranks.discard(rank)

    def refresh_all(self) -> None:
        """Update what the group knows of every rank of the roster."""
        for process in self._roster:
            self.refresh(process.rank)

    def clear(self, first_sequence: int, released: int | None, effects: Effects) -> None:
        """Remove all owners.

        Args:
            first_sequence: the first sequence of the membership that ends.
            released: an owner that arrived at this release becomes a former owner; None: no owner does.
            effects: receives the changed records.
        """
        for rank, owner in self.by_rank.items():
            owner.process.prefixes.discard(self._prefix)
            if released is not None and owner.start <= released:
                # The next membership may have the same first sequence, so the record must differ in it. And
                # it must not refer to a shape that is forgotten.
                shape = Shape(owner.shape.world_size)
                record = self._record_of(owner, shape, first_sequence)
                former = replace(record, membership_start=owner.start)
                self.former[rank] = former
                effects.records.append(former)
            else:
                effects.records.append(ForgetRankOwner(self._run_id, self._prefix, rank))
        self.by_rank.clear()
        self.shapes.clear(effects)
        self.gone_ranks.clear()

    def forget_former(self, effects: Effects) -> None:
        """Forget the former owners, since a newer release or generation replaced the release they missed."""
        effects.records += [ForgetRankOwner(self._run_id, self._prefix, rank) for rank in self.former]
        self.former.clear()

    def record(self, owner: RankOwner, first_sequence: int, effects: Effects) -> None:
        """Make the state of an owner durable."""
        shape = self.shapes.reference(owner.shape, effects)
        effects.records.append(self._record_of(owner, shape, first_sequence))

    def _record_of(self, owner: RankOwner, shape: Shape | int, first_sequence: int) -> RankOwnerRecord:
        process = owner.process
        state = process.state
        if not state.gone:
            state = MemberState.IDLE if process.unary else MemberState.DISCONNECTED
        return RankOwnerRecord(
            run_id=self._run_id,
            prefix=self._prefix,
            rank=process.rank,
            incarnation=process.incarnation,
            ordinal=process.ordinal,
            host=process.host,
            pid=process.pid,
            start_sequence=owner.start,
            shape=shape,
            state=state,
            lineage=process.lineage,
            membership_start=first_sequence,
            node_name="" if process.node_name == process.host else process.node_name,
        )
