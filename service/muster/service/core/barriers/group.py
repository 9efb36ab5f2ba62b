"""A group: all the barriers of one prefix, one after the other.

The invariants of docs/design.md that are kept here, each in the method named:

- invariant 1 (one decision per barrier), invariant 2 (durable before delivered): ``_decide``
- invariant 3 (repeated arrivals count once), invariant 4 (ranks stay in step after a failure): ``arrive``
- invariant 5 (every rank learns all missing ranks): ``missing``
- invariant 6 (a barrier does not wait for the dead): ``check``
- invariant 7 (one failure vote aborts the barrier), invariant 8 (disagreement fails every rank): ``_count``
- invariant 9 (one clock decides): ``arrive``, ``on_time``, and ``OpenBarrier``
- invariant 10 (subsets and payloads): ``_check_shape``, ``_check_arrival``
- invariant 11 (the newer fences the older), invariant 12 (the coordinator assigns the sequence): ``join``
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from muster.service.core.barriers import observations
from muster.service.core.barriers.barrier import OpenBarrier
from muster.service.core.barriers.checkpoints import Checkpoints
from muster.service.core.barriers.shapes import Shapes
from muster.service.core.elapsed import elapsed
from muster.service.core.membership.process import Process, answer, audience
from muster.service.core.membership.roster import Roster
from muster.service.core.timers import WakeUps
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import (
    Delivery,
    Effects,
    ForgetDecision,
    ForgetRankOwner,
    GroupRecord,
    ProbeRequest,
    Progress,
    RankOwnerRecord,
    Refused,
    ShapeRecord,
)
from muster.service.core.vocabulary.events import Arrival
from muster.service.core.vocabulary.limits import ByteTotal, Limits
from muster.service.core.vocabulary.model import (
    Decision,
    Failure,
    Instant,
    MemberState,
    MissingRank,
    MissingState,
    Outcome,
    Shape,
)
from muster.service.core.vocabulary.refusal import Reason, Refusal, limit_exceeded


@dataclass(slots=True, eq=False)
class RankOwner:
    """The process that speaks for a rank in a group."""

    process: Process
    start: int
    """The first sequence that it may arrive at."""
    shape: Shape
    last: int | None = None
    """The last sequence that it arrived at, as far as is known."""
    refused: int = 0
    """The last sequence at which its arrival was refused: it has heard all decisions before that."""
    counted_as_living: bool = False
    """Whether its shape is counted among those of the living."""


class Group:
    """The barriers of ``(run_id, prefix)``.

    Args:
        run_id: the run.
        prefix: the group's name within it.
        roster: the run's processes.
        limits: the coordinator's bounds.
        timers: where the group asks to be woken.
        checkpoints: the run's save history, which receives the decisions.
        gathered: the payloads that the groups of all runs hold.
        generation: the generation that its speakers belong to.
        first_sequence: the first sequence of that generation.
    """

    def __init__(
        self,
        run_id: str,
        prefix: str,
        *,
        roster: Roster,
        limits: Limits,
        timers: "WakeUps[Group]",
        checkpoints: Checkpoints,
        gathered: ByteTotal,
        generation: int,
        first_sequence: int = 0,
    ) -> None:
        self.run_id = run_id
        self.prefix = prefix
        self.generation = generation
        self.first_sequence = first_sequence
        self.next_sequence = first_sequence
        self.open: OpenBarrier | None = None
        self.decisions: dict[int, Decision] = {}
        """By sequence, ascending."""
        self.owners: dict[int, RankOwner] = {}
        self._roster = roster
        self._limits = limits
        self._timers = timers
        self._checkpoints = checkpoints
        self._gathered = gathered
        self._payload_bytes_held = 0
        """Bytes of payloads, of the open barrier and of the kept decisions."""
        self._last_release: int | None = None
        """The newest release of this generation: a proof that every rank had heard all earlier decisions."""
        self._former_owners: dict[int, RankOwnerRecord] = {}
        """By rank: the process of an earlier life that arrived at the newest release, and may not have heard
        it yet. A newer process of the rank takes its place."""
        self._known_laggard: int | None = None
        """A rank that had still to hear the oldest decision when that was looked for last."""
        self._gone_ranks: set[int] = set()
        """Ranks for which nobody is left to arrive."""
        self._shapes = Shapes(run_id, prefix)
        """Of the speakers; more than one of living speakers is a disagreement."""
        self._refresh_all()

    # ------------------------------------------------------------------ restoring

    def restore_decision(self, decision: Decision) -> None:
        """Take back a decision from storage; they come in ascending order of sequence."""
        self._keep(decision)
        self.next_sequence = max(self.next_sequence, decision.sequence + 1)
        if decision.outcome is Outcome.RELEASED and decision.generation == self.generation:
            self._last_release = decision.sequence

    def restore_shape(self, record: ShapeRecord) -> None:
        """Take back a shape from storage, before the speakers."""
        self._shapes.restore(record)

    def restore_owner(self, process: Process, start: int, shape: Shape | int) -> None:
        """Take back a speaker from storage, after the decisions.

        Raises:
            KeyError: its shape has no record.
        """
        released = self._last_release
        last = released if released is not None and start <= released else None
        self.owners[process.rank] = RankOwner(process, start, self._shapes.restored(shape), last)
        process.prefixes.add(self.prefix)

    def restore_former(self, record: RankOwnerRecord) -> None:
        """Take back from storage who arrived at the newest release in an earlier life."""
        self._former_owners[record.rank] = record

    def end(self) -> None:
        """The run is forgotten: the payloads are free, and nothing of the group is woken any more."""
        self._count_bytes(-self._payload_bytes_held)
        self._timers.disarm(self)

    # ------------------------------------------------------------------ membership

    def check_join(self, process: Process, shape: Shape) -> None:
        """Refuse a process that may not take part, before anything is changed."""
        self._check_shape(process, process.rank, shape)
        if self.generation != self._roster.generation:
            return
        owner = self.owners.get(process.rank)
        if owner is None:
            former = self._former_owners.get(process.rank)
            if former is not None and former.ordinal > process.ordinal:
                raise self._superseded(process, former)
            return
        if owner.process is process and owner.shape != shape:
            raise Refusal(
                Reason.SHAPE_CHANGED,
                f'{process} joined group "{self.prefix}" with {_shape_text(owner.shape)} and now '
                f"says {_shape_text(shape)}. Use another prefix for other participants.",
            )
        if owner.process.ordinal > process.ordinal:
            raise self._superseded(process, owner.process)

    def _check_shape(self, process: Process | str, rank: int, shape: Shape) -> None:
        """Refuse a process whose rank is not in the shape that it brings."""
        if rank not in shape:
            raise Refusal(
                Reason.NOT_A_PARTICIPANT,
                f'{process} cannot join group "{self.prefix}": {_shape_text(shape)} does not '
                f"include rank {rank}. Mend the rank, the world size or the participants.",
            )

    def join(self, process: Process, shape: Shape, now: Instant, effects: Effects) -> int:
        """Let a process that passed :meth:`check_join` take part; the newest incarnation speaks for its rank.

        Returns:
            The first sequence that the process may arrive at. A rank's first process starts at the
            generation's first sequence, so that it hears what it missed (or behind a release that did
            not need it); a restarted one starts at the next undecided sequence. One that comes back from
            an earlier life starts at the newest release if it arrived there.
        """
        if self.generation != self._roster.generation:
            self.reset_membership(effects)
        owner = self.owners.get(process.rank)
        if owner is not None and owner.process is process:
            return owner.start
        if self._is_abandoned:
            # Everyone has left: invariant 8 (disagreement fails every rank) binds the living only.
            self.abort(report.abandoned(str(process)), now, effects)
            self.reset_membership(effects)
            owner = None
        returns = self._arrived_at_last_release(process.rank, process.incarnation)
        start = self._start_of(process.rank, process.incarnation)
        self._former_owners.pop(process.rank, None)
        joined = RankOwner(process, start, self._shapes.add(shape), last=start if returns else None)
        if owner is not None:
            self._withdraw(owner, process, effects)
        self.owners[process.rank] = joined
        process.prefixes.add(self.prefix)
        self._record_owner(joined, effects)
        self.refresh(process.rank)
        return start

    def lineage(self, rank: int) -> int | None:
        """The lineage of the process that spoke last for a rank in this generation; None: none did."""
        if self.generation != self._roster.generation:
            return None
        owner = self.owners.get(rank)
        last = owner.process if owner is not None else self._former_owners.get(rank)
        return last.lineage if last is not None else None

    @property
    def _is_abandoned(self) -> bool:
        """Whether someone spoke here, and nobody of them lives any more."""
        return bool(self.owners) and not self._shapes.any_living

    def _start_of(self, rank: int, incarnation: str) -> int:
        """The first sequence that an incarnation may arrive at which does not speak for the rank yet."""
        if rank in self.owners:
            return self.next_sequence
        released = self._last_release
        if released is None:
            return max(self.first_sequence, self._oldest)
        if self._arrived_at_last_release(rank, incarnation):
            return released
        return max(self.first_sequence, self._oldest, released + 1)

    def _arrived_at_last_release(self, rank: int, incarnation: str) -> bool:
        """Whether an incarnation arrived at the newest release in an earlier life, and comes back now."""
        former = self._former_owners.get(rank) if self._last_release is not None else None
        return former is not None and former.incarnation == incarnation

    def _forget_former(self, effects: Effects) -> None:
        """The newest release need not be told any more to those who arrived in an earlier life."""
        effects.records += [ForgetRankOwner(self.run_id, self.prefix, rank) for rank in self._former_owners]
        self._former_owners.clear()

    def refresh(self, rank: int) -> None:
        """Bring up to date what the group knows of a rank, after one of its processes changed."""
        owner = self.owners.get(rank)
        if owner is not None and owner.counted_as_living != owner.process.state.living:
            owner.counted_as_living = not owner.counted_as_living
            self._shapes.count_living(owner.shape, 1 if owner.counted_as_living else -1)
        if self._roster.is_gone(rank, owner.process if owner else None):
            self._gone_ranks.add(rank)
        else:
            self._gone_ranks.discard(rank)

    def record_state_change(self, rank: int, effects: Effects) -> None:
        """A speaker died or came back from the dead: keep that, for the next start."""
        owner = self.owners.get(rank)
        if owner is not None:
            self._record_owner(owner, effects)

    def reset_membership(self, effects: Effects) -> None:
        """Nobody speaks any more; the next sequence is the first of a new life.

        Within a generation, a process of the past may live still, behind a network that was broken for
        long. So whoever arrived at the newest release may hear it until the next one.

        No barrier is open then: the caller has aborted it.
        """
        same_job = self.generation == self._roster.generation
        for rank, owner in self.owners.items():
            owner.process.prefixes.discard(self.prefix)
            if same_job and self._last_release is not None and owner.start <= self._last_release:
                # Before the next life, whose first sequence may be that of this one, and without its shape.
                shape = Shape(owner.shape.world_size)
                former = replace(self._owner_record(owner, shape), life=owner.start)
                self._former_owners[rank] = former
                effects.records.append(former)
            else:
                effects.records.append(ForgetRankOwner(self.run_id, self.prefix, rank))
        self.owners.clear()
        self._shapes.clear(effects)
        self.first_sequence = self.next_sequence
        if not same_job:
            self.generation = self._roster.generation
            self._forget_former(effects)
            self._trim_heard(self._kept_from, self.next_sequence, effects)
            self._last_release = None
        self._gone_ranks.clear()
        self._refresh_all()
        effects.records.append(self.record)

    def _refresh_all(self) -> None:
        for process in self._roster:
            self.refresh(process.rank)

    @property
    def record(self) -> GroupRecord:
        """What is kept of the group beside its decisions and speakers."""
        return GroupRecord(self.run_id, self.prefix, self.generation, self.first_sequence)

    def _withdraw(self, old: RankOwner, newer: Process, effects: Effects) -> None:
        """A newer incarnation takes over: what the older one left open does not count any more."""
        old.process.prefixes.discard(self.prefix)
        if old.counted_as_living:
            self._shapes.count_living(old.shape, -1)
        self._shapes.remove(old.shape, effects)
        if self.open is None or self.open.arrivals.get(old.process.rank) is not old.process:
            return
        self._count_bytes(-self.open.withdraw(old.process.rank))
        if old.process.session is not None:
            refusal = self._superseded(old.process, newer)
            rank, sequence = old.process.rank, self.open.sequence
            effects.send(old.process.session, Refused(refusal, self.prefix, sequence, rank))

    # ------------------------------------------------------------------ arriving

    def arrive(
        self,
        process: Process,
        sequence: int | None,
        timeout: float,
        arrival: Arrival,
        now: Instant,
        effects: Effects,
        progress_after: float = 0.0,
        waited: float = 0.0,
    ) -> None:
        """A rank arrives, or asks again. A decided sequence is over, and answers with its decision."""
        owner = self.owners.get(process.rank)
        if owner is None or owner.process is not process:
            raise self._not_the_owner(process, owner)
        if sequence is None:
            sequence = self._next_of(owner)
        if sequence >= self.next_sequence:
            self._check_arrival(process, sequence, self.next_sequence, arrival)
            if self.open is None:
                owner.refused = sequence
                self._trim_before(self._check_unheard(owner.shape, process.rank, sequence), effects)
                begin = sequence, owner.shape, timeout, progress_after, now.monotonic
                self.open = OpenBarrier.begin(*begin)
                self._timers.arm(self, self.open.due)
            since = now.monotonic - elapsed(waited, timeout)
            more = self.open.add(process, arrival, since, timeout, now.monotonic)
            if more:
                self._count_bytes(more)
            if waited:
                self._timers.arm(self, self.open.due)
            owner.last = sequence
            self._evaluate(owner, arrival, more, now, effects)
        else:
            answer(process, self._decided(process, owner.start, sequence), effects)
            owner.last = max(sequence, owner.last or 0)

    def _next_of(self, owner: RankOwner) -> int:
        """Where a caller that names no sequence arrives: where it waits already, or else at its next."""
        if owner.last is None:
            return owner.start
        waits = self.open is not None and self.open.sequence == owner.last
        # Decisions of earlier lives may be forgotten before one who comes back from there has heard them.
        return owner.last if waits else max(owner.last + 1, self._oldest)

    def check_unary_arrival(
        self,
        known: Process | None,
        incarnation: str,
        name: str,
        shape: Shape,
        sequence: int | None,
        arrival: Arrival,
        *,
        anew: bool,
    ) -> Decision | None:
        """Refuse a call that would join and arrive, before it does either.

        Args:
            known: its process, if it has called before.
            incarnation: of its process, if it is of the run's generation; else empty.
            name: of its process.
            shape: that it sees.
            sequence: that it arrives at; None: the next one.
            arrival: of its rank.
            anew: whether the run begins a new life with it, which aborts the open barrier.

        Returns:
            A decision of the life before, which the call asks for: it hears that, and begins nothing.
        """
        self._check_shape(name, arrival.rank, shape)
        owner = self.owners.get(arrival.rank)
        own = owner if owner is not None and owner.process is known else None
        anew = anew or self.generation != self._roster.generation or (own is None and self._is_abandoned)
        if known is not None:
            self.check_join(known, shape)
        upcoming = self.next_sequence + (anew and self.open is not None)
        returns = self._arrived_at_last_release(arrival.rank, incarnation)
        if own is not None:
            start = own.start
        elif anew and not returns:
            start = upcoming
        else:
            start = self._start_of(arrival.rank, incarnation)
        if sequence is None:
            if own is not None:
                sequence = self._next_of(own)
            elif anew:
                # It joins in any case: if it must hear a decision first, its next call must get further.
                sequence = upcoming
            else:
                sequence = max(start + returns, self._oldest)
        if sequence < self.next_sequence:
            decision = self._decided(name, start, sequence)
            return decision if anew else None
        if sequence < upcoming:
            return None  # Of the barrier that it will find aborted.
        self._check_arrival(name, sequence, upcoming, arrival)
        if self.open is None and not anew:
            self._check_unheard(shape, arrival.rank, sequence)
        return None

    def _decided(self, process: Process | str, start: int, sequence: int) -> Decision:
        """The decision of a sequence that is over.

        A failure may be told to anyone. A release from before the process joined may not: its own
        incarnation had not arrived at it: invariant 12 (the coordinator assigns the sequence).
        """
        decision = self.decisions.get(sequence)
        failed = decision is not None and decision.outcome is not Outcome.RELEASED
        if sequence < start and not failed:
            raise Refusal(
                Reason.SEQUENCE_BEHIND,
                f'{process} arrived at #{sequence} of group "{self.prefix}", which was decided '
                f"before this process joined; it starts at #{start}. Take the sequence from the "
                "coordinator's answer to JoinGroup.",
                start_sequence=start,
            )
        if decision is None:
            raise Refusal(
                Reason.SEQUENCE_FORGOTTEN,
                f'{process} arrived at #{sequence} of group "{self.prefix}" again, long after '
                f"every rank had gone on to #{self.next_sequence}; its outcome is no longer kept.",
                next_sequence=self.next_sequence,
            )
        return decision

    def _check_unheard(self, shape: Shape, rank: int, sequence: int) -> int:
        """Refuse the first arrival at a barrier if too many decisions must still be heard.

        Args:
            shape: of the barrier.
            rank: the rank that arrives.
            sequence: the barrier.

        Returns:
            The first decision that a rank must still hear. While there is room, it may be a later one.
        """
        most = self._limits.unheard_decisions(shape.size)
        needed = self._unheard_from
        if self.next_sequence - needed > most * 3 // 4:
            # Before it is urgent: after a restart nobody knows who heard what, until all arrive again.
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
        """The first decision that a rank must still hear, when ``rank`` arrives at ``sequence``."""
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
        """The first decision that a rank may still ask for: who arrives has heard all that came before."""
        owner = self.owners.get(rank)
        if owner is None:
            return self._start_of(rank, "")
        return max(owner.start if owner.last is None else owner.last, owner.refused)

    def _evaluate(
        self, owner: RankOwner, arrival: Arrival, more: int, now: Instant, effects: Effects
    ) -> None:
        """Decide, if there is nothing left to wait for after an arrival at the open barrier.

        Args:
            owner: of the rank that arrived.
            arrival: what it brought.
            more: how many bytes of payload the barrier holds more since then.
            now: this moment.
            effects: is added to.
        """
        barrier = self.open
        assert barrier is not None
        failure = arrival.failure
        if failure is None and more and (refusal := self._payload_overflow(barrier)) is not None:
            failure = refusal.message
        if failure is not None:
            process = owner.process
            reason = _cut(failure, self._limits.max_reason_bytes)
            barrier.failures.append(Failure(process.rank, process.host, process.pid, reason))
            self._decide(Outcome.ABORTED, report.voted(barrier.failures), now, effects, process.rank)
            return
        if owner.shape is not barrier.shape or self._shapes.disagree:
            other = self._disagreeing(owner)
            if other is not None:
                self._decide(Outcome.MISMATCHED, _disagreement(owner, other), now, effects)
                return
            # Whoever opened the barrier with another shape has been superseded since.
            barrier.shape = owner.shape
        if barrier.complete:
            waited = now.monotonic - barrier.opened_at
            last = barrier.last_arrival_rank
            assert last is not None
            self._decide(Outcome.RELEASED, report.released(barrier.shape.size, waited, last), now, effects)
        elif self._gone_ranks:
            self.check(now, effects)

    def _disagreeing(self, owner: RankOwner) -> RankOwner | None:
        """A living speaker, or one whose arrival counts, that sees another shape than ``speaker``."""
        arrived = self.open.arrivals if self.open else {}
        for other in self.owners.values():
            counts = other.counted_as_living or arrived.get(other.process.rank) is other.process
            if counts and other.shape is not owner.shape:
                return other
        return None

    # ------------------------------------------------------------------ deciding

    def check(self, now: Instant, effects: Effects) -> None:
        """Fail the open barrier if a rank that it still needs is gone."""
        barrier = self.open
        if barrier is None or not self._gone_ranks:
            return
        needed = [r for r in self._gone_ranks if r in barrier.shape and r not in barrier.arrivals]
        if needed:
            gone = self.missing(barrier, now, sorted(needed))
            self._decide(Outcome.MEMBER_LOST, report.member_lost(gone), now, effects, gone[0].rank)

    def abort(self, reason: str, now: Instant, effects: Effects) -> Decision | None:
        """End the open barrier for everyone, if there is one."""
        if self.open is None:
            return None
        reason = _cut(reason, self._limits.max_reason_bytes)
        return self._decide(Outcome.ABORTED, report.aborted(reason), now, effects)

    def on_time(self, now: Instant, effects: Effects) -> None:
        """Tell who is missing at half of the timeout, or before if that was asked for, and time out."""
        barrier = self.open
        if barrier is None:
            return
        if now.monotonic >= barrier.deadline:
            self._decide(Outcome.TIMED_OUT, report.timed_out(barrier.timeout), now, effects)
            return
        if now.monotonic >= barrier.due and not barrier.probed:
            barrier.probed = True
            missing = (self._process_of(rank) for rank in barrier.shape if rank not in barrier.arrivals)
            left = max(0.0, barrier.reports_at - now.monotonic)
            effects.probes.append(ProbeRequest(self.run_id, observations.select_probe_targets(missing), left))
        if now.monotonic >= barrier.reports_at:
            barrier.mark_reported(now.monotonic)
            progress = self.progress(barrier, now)
            effects.deliveries.append(Delivery(audience(barrier.arrivals.values()), progress))
        self._timers.arm(self, barrier.due)

    def _decide(
        self,
        outcome: Outcome,
        why: str,
        now: Instant,
        effects: Effects,
        suspect: int | None = None,
    ) -> Decision:
        """The only place where a barrier gets its outcome; ``suspect`` is the rank to look at first."""
        barrier = self.open
        assert barrier is not None
        assert barrier.sequence == self.next_sequence
        self.open = None
        self._count_bytes(-barrier.payload_bytes)
        self.next_sequence += 1
        released = outcome is Outcome.RELEASED
        missing = () if released else tuple(self.missing(barrier, now, barrier.shape))
        if suspect is None and missing:
            suspect = missing[0].rank
        required = barrier.shape.size
        # Not the number of arrivals: one who disagrees may be a rank that the shape does not know.
        arrived = required - len(missing)
        decision = Decision(
            run_id=self.run_id,
            prefix=self.prefix,
            sequence=barrier.sequence,
            generation=self.generation,
            outcome=outcome,
            message=report.decision(
                report.barrier_name(self.run_id, self.prefix, barrier.sequence),
                why,
                outcome,
                self.run_id,
                arrived,
                required,
                missing,
                suspect,
            ),
            missing=missing,
            arrived=arrived,
            required=required,
            payloads=tuple(sorted(barrier.payloads.items())) if released else (),
            failures=tuple(barrier.failures),
            decided_at=now.wall,
            wait=now.monotonic - barrier.opened_at,
            skew=barrier.last_arrival_at - barrier.opened_at,
            last_arrival_rank=barrier.last_arrival_rank,
        )
        self._keep(decision)
        effects.records.append(decision)
        effects.decisions.append(decision)
        self._trim_former_decisions(required, effects)
        told = audience(barrier.arrivals.values())
        if told:
            effects.deliveries.append(Delivery(told, decision))
        if released:
            self._released(barrier, effects)
        if barrier.reports:
            self._checkpoints.record_decision(decision, why, barrier, effects)
        return decision

    def _released(self, barrier: OpenBarrier, effects: Effects) -> None:
        kept_from, self._last_release = self._kept_from, barrier.sequence
        self._trim_heard(kept_from, barrier.sequence, effects)
        self._forget_former(effects)
        if len(self.owners) == len(barrier.arrivals):
            return
        for rank, owner in self.owners.items():
            if rank not in barrier.arrivals:
                # Not needed, and not there: it must not hear of this release as if it had arrived.
                owner.start = barrier.sequence + 1
                self._record_owner(owner, effects)

    @property
    def _kept_from(self) -> int:
        """No rank, and nobody of an earlier life, needs a decision before this one."""
        return self.first_sequence if self._last_release is None else self._last_release

    @property
    def _unheard_from(self) -> int:
        """No rank of this life needs a decision before this one."""
        return max(self.first_sequence, self._kept_from, self._oldest)

    @property
    def _oldest(self) -> int:
        """The first decision that is kept."""
        return next(iter(self.decisions), self.next_sequence)

    def _trim_heard(self, start: int, sequence: int, effects: Effects) -> None:
        """Every rank has heard the decisions from ``start`` to ``sequence``: keep a few, for people.

        One with payloads is forgotten at once, for they may be large.
        """
        for heard in range(start, sequence):
            decision = self.decisions.get(heard)
            if decision is not None and decision.payloads and heard != self.next_sequence - 1:
                self._forget(heard, effects)
        most = self._limits.history(max((one.required for one in self.decisions.values()), default=1))
        # The last decision is kept in any case: it tells a restarted coordinator what comes next.
        self._trim(most, sequence - 1, effects)

    def _trim_former_decisions(self, ranks: int, effects: Effects) -> None:
        """Keep no more decisions of earlier lives than one life may have that is not heard.

        A process of theirs that comes back later than that is told to join again.
        """
        self._trim(self._limits.unheard_decisions(ranks), self._unheard_from, effects)

    def _trim_before(self, sequence: int, effects: Effects) -> None:
        """Every rank has heard the decisions before ``sequence``: keep a few, for people."""
        if sequence <= self._unheard_from:
            return
        most = self._limits.unheard_decisions(max(one.required for one in self.decisions.values())) // 2
        self._trim(max(1, most), sequence, effects)

    def _trim(self, most: int, before: int, effects: Effects) -> None:
        """Forget the oldest decisions before sequence ``before`` while more than ``most`` are kept."""
        while len(self.decisions) > most and self._oldest < before:
            self._forget(self._oldest, effects)

    def _keep(self, decision: Decision) -> None:
        self.decisions[decision.sequence] = decision
        self._count_bytes(_payload_bytes(decision))

    def _forget(self, sequence: int, effects: Effects) -> None:
        self._count_bytes(-_payload_bytes(self.decisions.pop(sequence)))
        effects.records.append(ForgetDecision(self.run_id, self.prefix, sequence))

    def _count_bytes(self, more: int) -> None:
        """Count bytes of payloads that come (or go, if ``more`` is negative)."""
        self._payload_bytes_held += more
        self._gathered.bytes += more

    # ------------------------------------------------------------------ telling

    def missing(self, barrier: OpenBarrier, now: Instant, ranks: Iterable[int]) -> list[MissingRank]:
        """Those of ``ranks`` that have not arrived, with the reason for each."""
        arrivals = barrier.arrivals
        return [self._missing_rank(r, now.monotonic) for r in ranks if r not in arrivals]

    def progress(self, barrier: OpenBarrier, now: Instant) -> Progress:
        """How the open barrier stands."""
        missing = tuple(self.missing(barrier, now, barrier.shape))
        arrived, required = len(barrier.arrivals), barrier.shape.size
        name = report.barrier_name(self.run_id, self.prefix, barrier.sequence)
        waited = now.monotonic - barrier.opened_at
        message = report.progress(name, waited, arrived, required, missing)
        return Progress(self.prefix, barrier.sequence, arrived, required, missing, message)

    def _process_of(self, rank: int) -> Process | None:
        """The process to name for a rank: who speaks for it, or may take its place, or its newest."""
        owner = self.owners.get(rank)
        if owner is None:
            return self._roster.newest(rank)
        successor = self._roster.successor(owner.process) if owner.process.state.gone else None
        return successor or owner.process

    def _missing_rank(self, rank: int, now: float) -> MissingRank:
        process = self._process_of(rank)
        if process is None:
            return MissingRank(rank, MissingState.NEVER_JOINED)
        owner = self.owners.get(rank)
        speaks = owner is not None and owner.process is process
        last = owner.last if owner is not None and speaks else None
        match process.state:
            case MemberState.CONNECTED | MemberState.IDLE:
                state, gone_for = MissingState.NOT_ARRIVED, 0.0
            case MemberState.LEFT:
                state, gone_for = MissingState.LEFT, now - process.since
            case MemberState.EVICTED:
                state, gone_for = MissingState.EVICTED, now - process.since
            case MemberState.DISCONNECTED | MemberState.LOST:
                state, gone_for = MissingState.CONNECTION_LOST, now - process.since
        doing = observations.recent_activity(process, now)
        return MissingRank(rank, state, process.host, process.pid, gone_for, last, doing)

    # ------------------------------------------------------------------ refusing

    def _check_arrival(self, process: Process | str, sequence: int, upcoming: int, arrival: Arrival) -> None:
        """Refuse an arrival ahead of the next barrier, or with a payload too large, before one opens."""
        if sequence > upcoming:
            raise Refusal(
                Reason.SEQUENCE_AHEAD,
                f'{process} arrived at #{sequence} of group "{self.prefix}", whose next barrier is '
                f"#{upcoming}. Either the process did not take its sequence from the coordinator, or the run "
                "was forgotten, or the coordinator lost its state (memory: storage does not survive a "
                "restart): start the run as a new generation.",
                next_sequence=upcoming,
            )
        size, most = len(arrival.payload), self._limits.max_payload_bytes
        if size > most:
            raise limit_exceeded(
                "max_payload_bytes",
                most,
                f'{process} sent {size:,} bytes with its arrival at "{self.prefix}" #{upcoming}',
            )

    def _payload_overflow(self, barrier: OpenBarrier) -> Refusal | None:
        """Return why the barrier must fail for all ranks, if its payloads are too much with the last one.

        A payload above ``max_payload_bytes`` is its rank's own mistake, and the coordinator refuses that
        arrival alone. The other two bounds depend on the payloads of others. If the coordinator refused one
        arrival, the other ranks would wait for it until the timeout. The refused rank would keep its
        sequence, and its next arrival, meant for a later barrier, would complete this one. A decision ends
        the sequence for all, by invariant 4 (ranks stay in step after a failure), and frees the payloads.
        """
        limits = self._limits
        name = f'"{self.prefix}" #{barrier.sequence}'
        if barrier.payload_bytes > limits.max_gather_bytes:
            return limit_exceeded(
                "max_gather_bytes",
                limits.max_gather_bytes,
                f"the payloads of {name} come to {barrier.payload_bytes:,} bytes with those of "
                f"{len(barrier.arrivals)} of {barrier.shape.size} ranks",
            )
        if self._gathered.bytes > limits.max_total_gather_bytes:
            return limit_exceeded(
                "max_total_gather_bytes",
                limits.max_total_gather_bytes,
                f"the payloads of all runs come to {self._gathered.bytes:,} bytes with this one for {name}",
            )
        return None

    def _not_the_owner(self, process: Process, owner: RankOwner | None) -> Refusal:
        if owner is not None and owner.process.ordinal > process.ordinal:
            return self._superseded(process, owner.process)
        return Refusal(
            Reason.NOT_JOINED,
            f'{process} arrived at group "{self.prefix}" of run {self.run_id} without having joined '
            "it. Send JoinGroup first.",
        )

    def _superseded(self, older: Process, newer: Process | RankOwnerRecord) -> Refusal:
        name = report.process_name(newer.rank, newer.host, newer.pid)
        return Refusal(
            Reason.SUPERSEDED,
            f'{older} no longer speaks for its rank in group "{self.prefix}" of run {self.run_id}: '
            f"{name} said hello later. End one of the two.",
            newer_host=newer.host,
            newer_pid=newer.pid,
        )

    def _record_owner(self, owner: RankOwner, effects: Effects) -> None:
        shape = self._shapes.reference(owner.shape, effects)
        effects.records.append(self._owner_record(owner, shape))

    def _owner_record(self, owner: RankOwner, shape: Shape | int) -> RankOwnerRecord:
        process = owner.process
        state = process.state
        if not state.gone:
            state = MemberState.IDLE if process.unary else MemberState.DISCONNECTED
        return RankOwnerRecord(
            run_id=self.run_id,
            prefix=self.prefix,
            rank=process.rank,
            incarnation=process.incarnation,
            ordinal=process.ordinal,
            host=process.host,
            pid=process.pid,
            start_sequence=owner.start,
            shape=shape,
            state=state,
            lineage=process.lineage,
            life=self.first_sequence,
        )


def _payload_bytes(decision: Decision) -> int:
    return sum(len(payload) for _, payload in decision.payloads)


def _shape_text(shape: Shape) -> str:
    if not shape.participants:
        return f"world size {shape.world_size}"
    return f"participants {report.ranges(shape.participants)} of world size {shape.world_size}"


def _disagreement(one: RankOwner, other: RankOwner) -> str:
    names = str(one.process), str(other.process)
    if one.shape.world_size != other.shape.world_size:
        sizes = str(one.shape.world_size), str(other.shape.world_size)
        return report.mismatched("world size", names[0], sizes[0], names[1], sizes[1])
    lists = [report.ranges(s.shape) for s in (one, other)]
    return report.mismatched("participants", names[0], lists[0], names[1], lists[1])


def _cut(text: str, limit: int) -> str:
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return text
    return data[:limit].decode("utf-8", "ignore") + f" … (cut at {limit:,} bytes)"
