"""The sequences of a group: where each rank goes on, and which decisions ranks must still hear.

A rank that misses a barrier hears its decision later, by invariant 4 (ranks stay in step after a failure). So
the group keeps a decision until no rank can ask for it any more.
"""

from muster.service.core.barriers import refusals
from muster.service.core.barriers.barrier import OpenBarrier
from muster.service.core.barriers.history import DecisionHistory
from muster.service.core.barriers.owners import RankOwner, RankOwners
from muster.service.core.membership.process import Process
from muster.service.core.membership.roster import Roster
from muster.service.core.vocabulary.limits import ByteTotal, Limits
from muster.service.core.vocabulary.model import Decision, Outcome, Shape
from muster.service.core.vocabulary.records import RankOwnerRecord, ShapeRecord
from muster.service.core.vocabulary.refusal import limit_exceeded


class Positions:
    """The part of a group that knows the sequences of its ranks; :class:`Group` decides.

    Args:
        run_id: the run.
        prefix: the group's name within it.
        roster: the run's processes.
        limits: the coordinator's bounds.
        gathered: payload bytes of all groups of all runs.
        generation: the generation of its rank owners.
        first_sequence: the first sequence of its membership.
    """

    def __init__(
        self,
        run_id: str,
        prefix: str,
        roster: Roster,
        limits: Limits,
        gathered: ByteTotal,
        generation: int,
        first_sequence: int,
    ) -> None:
        self.run_id = run_id
        self.prefix = prefix
        self.generation = generation
        self.first_sequence = first_sequence
        """The first sequence of the membership: since the group was created, or last reset."""
        self.next_sequence = first_sequence
        self.open: OpenBarrier | None = None
        self._roster = roster
        self._limits = limits
        self._history = DecisionHistory(run_id, prefix, limits, gathered)
        self._owners = RankOwners(run_id, prefix, roster)
        self.decisions = self._history.decisions
        """By sequence, ascending."""
        self.owners = self._owners.by_rank
        self._last_release: int | None = None
        """The newest release of this generation: a proof that every rank has heard all earlier decisions."""
        self._known_laggard: int | None = None
        """A rank that had not heard the oldest decision yet when the group last looked."""

    # ------------------------------------------------------------------ restoring

    def restore_decision(self, decision: Decision) -> None:
        """Restore a decision; decisions come in ascending order of sequence."""
        self._history.add(decision)
        self.next_sequence = max(self.next_sequence, decision.sequence + 1)
        if decision.outcome is Outcome.RELEASED and decision.generation == self.generation:
            self._last_release = decision.sequence

    def restore_shape(self, record: ShapeRecord) -> None:
        """Restore a shape, before the owners."""
        self._owners.shapes.restore(record)

    def restore_owner(self, process: Process, start: int, shape: Shape | int) -> None:
        """Restore the owner of a rank, after the decisions.

        Raises:
            KeyError: its shape has no record.
        """
        self._owners.restore(process, start, shape, self._last_release)

    def restore_former(self, record: RankOwnerRecord) -> None:
        """Restore an owner from before the last reset, which arrived at the newest release."""
        self._owners.former[record.rank] = record

    # ------------------------------------------------------------------ where ranks go on

    def lineage(self, rank: int) -> int | None:
        """Return the lineage of a rank's last owner in this generation; None if it had no owner."""
        return self._owners.lineage(rank) if self.generation == self._roster.generation else None

    def _start_of(self, rank: int, incarnation: str) -> int:
        """Return the first sequence that an incarnation may arrive at if it joins now."""
        if rank in self.owners:
            return self.next_sequence
        released = self._last_release
        if released is None:
            return max(self.first_sequence, self._oldest)
        if self._missed_last_release(rank, incarnation):
            return released
        return max(self.first_sequence, self._oldest, released + 1)

    def _missed_last_release(self, rank: int, incarnation: str) -> bool:
        """Whether an incarnation is a former owner that may not have heard the newest release."""
        former = self._owners.former.get(rank) if self._last_release is not None else None
        return former is not None and former.incarnation == incarnation

    def _next_of(self, owner: RankOwner) -> int:
        """Return the sequence of an arrival that names none: where the rank waits, or else its next."""
        if owner.last is None:
            return owner.start
        waits = self.open is not None and self.open.sequence == owner.last
        # A former owner may come back after the decisions that it missed were dropped.
        return owner.last if waits else max(owner.last + 1, self._oldest)

    def _decided(self, process: Process | str, start: int, sequence: int) -> Decision:
        """Return the decision of a sequence that is over.

        Any process may hear a failure. A process may not hear a release from before it joined, because its
        own incarnation had not arrived there: invariant 12 (the coordinator assigns the sequence).
        """
        decision = self.decisions.get(sequence)
        failed = decision is not None and decision.outcome is not Outcome.RELEASED
        if sequence < start and not failed:
            raise refusals.sequence_behind(self.prefix, process, sequence, start)
        if decision is not None and decision.payloads_dropped:
            raise refusals.payloads_dropped(self.prefix, process, sequence, self.next_sequence)
        if decision is None:
            raise refusals.sequence_forgotten(self.prefix, process, sequence, self.next_sequence)
        return decision

    # ------------------------------------------------------------------ what ranks must still hear

    def _check_unheard(self, shape: Shape, rank: int, sequence: int) -> int:
        """Refuse the first arrival at a barrier if ranks must still hear too many decisions.

        Args:
            shape: of the barrier.
            rank: the rank that arrives.
            sequence: the barrier.

        Returns:
            The first decision that some rank must still hear; while there is room, a lower bound of it.
        """
        most = self._limits.unheard_decisions(shape.size)
        needed = self._unheard_from
        if self.next_sequence - needed > most * 3 // 4:
            # Early, because a restarted coordinator does not know what ranks have heard until they arrive.
            needed = self._first_unheard_of_all(shape, rank, sequence)
        unheard = self.next_sequence - needed
        if unheard >= most:
            raise limit_exceeded(
                "max_unheard_decisions",
                most,
                f'group "{self.prefix}" of run {self.run_id} has had {unheard} decisions in a row without '
                "a release, and a rank that was missing must still hear each of them",
            )
        return needed

    def _first_unheard_of_all(self, shape: Shape, rank: int, sequence: int) -> int:
        """Return the first decision that some rank must still hear when ``rank`` arrives at ``sequence``."""
        oldest, lowest = self._unheard_from, sequence
        known = self._known_laggard
        if known is not None and known != rank and known in shape and self._first_unheard(known) <= oldest:
            return oldest
        for other in shape:
            needs = sequence if other == rank else self._first_unheard(other)
            if needs <= oldest:
                self._known_laggard = other
                return oldest
            lowest = min(lowest, needs)
        return lowest

    def _first_unheard(self, rank: int) -> int:
        """Return the first decision that a rank may ask for; it has heard all before its last arrival."""
        owner = self.owners.get(rank)
        if owner is None:
            return self._start_of(rank, "")
        return max(owner.start if owner.last is None else owner.last, owner.refused)

    @property
    def _kept_from(self) -> int:
        """No rank and no former owner needs a decision before this one."""
        return self.first_sequence if self._last_release is None else self._last_release

    @property
    def _unheard_from(self) -> int:
        """No rank of this membership needs a decision before this one."""
        return max(self.first_sequence, self._kept_from, self._oldest)

    @property
    def _oldest(self) -> int:
        """The sequence of the oldest kept decision."""
        return self._history.oldest(self.next_sequence)
