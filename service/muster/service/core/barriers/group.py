"""A group: all the barriers of one prefix, one after the other.

Most of the invariants of barriers (docs/design.md) are kept here and in :mod:`.barrier`. That page names the
methods for each.
"""

from collections.abc import Iterable

from muster.service.core.barriers import observations, refusals
from muster.service.core.barriers.barrier import OpenBarrier
from muster.service.core.barriers.checkpoints import Checkpoints
from muster.service.core.barriers.missing import missing_rank, process_to_name
from muster.service.core.barriers.owners import RankOwner
from muster.service.core.barriers.payload_total import PayloadTotal
from muster.service.core.barriers.positions import Positions
from muster.service.core.elapsed import elapsed
from muster.service.core.membership.process import Process, answer, audience
from muster.service.core.membership.roster import Roster
from muster.service.core.timers import WakeUps
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import Delivery, Effects, ProbeRequest, Progress, Refused
from muster.service.core.vocabulary.events import Arrival
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision, Failure, Instant, MissingRank, Outcome, Shape
from muster.service.core.vocabulary.records import GroupRecord
from muster.service.core.vocabulary.refusal import limit_exceeded


class Group(Positions):
    """The barriers of ``(run_id, prefix)``.

    Args:
        run_id: the run.
        prefix: the group's name within it.
        roster: the run's processes.
        limits: the coordinator's bounds.
        timers: wakes the group.
        checkpoints: the run's save history, which receives the decisions.
        gathered: payload bytes of all groups of all runs.
        generation: the generation of its rank owners.
        first_sequence: the first sequence of its membership.
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
        gathered: PayloadTotal,
        generation: int,
        first_sequence: int = 0,
    ) -> None:
        super().__init__(run_id, prefix, roster, limits, gathered, generation, first_sequence)
        self._timers = timers
        self._checkpoints = checkpoints
        self._gathered = gathered
        self._gone_ranks = self._owners.gone_ranks
        self._shapes = self._owners.shapes

    def end(self) -> None:
        """Free the payloads and cancel the timer, because the run was removed."""
        self._history.release_bytes()
        self._timers.disarm(self)

    def drop_payloads(self, effects: Effects) -> int:
        """Drop the payloads of all releases, to make room. Returns how many bytes that frees."""
        return self._history.drop_payloads(effects)

    @property
    def payload_bytes(self) -> int:
        """Payload bytes of the open barrier and the kept decisions."""
        return self._history.bytes

    # ------------------------------------------------------------------ membership

    def check_join(self, process: Process, shape: Shape) -> None:
        """Refuse a process that may not take part, before anything is changed."""
        self._check_shape(process, process.rank, shape)
        if self.generation == self._roster.generation:
            self._owners.check(process, shape)

    def _check_shape(self, process: Process | str, rank: int, shape: Shape) -> None:
        """Refuse a process whose rank is not in the shape that it brings."""
        if rank not in shape:
            raise refusals.not_a_participant(self.prefix, process, rank, shape)

    def join(self, process: Process, shape: Shape, now: Instant, effects: Effects) -> int:
        """Let a process that passed :meth:`check_join` own its rank; the newest incarnation wins.

        Returns:
            The first sequence that the process may arrive at. A rank's first process starts at the
            generation's first sequence, so that it hears what it missed (or after a release that did
            not need it). A restarted process starts at the next undecided sequence. A former owner that
            comes back starts at the newest release if it arrived there.
        """
        if self.generation != self._roster.generation:
            self.reset_membership(effects)
        owner = self.owners.get(process.rank)
        if owner is not None and owner.process is process:
            return owner.start
        if self._owners.all_gone:
            # By invariant 8 (disagreement fails every rank), only living owners are bound to one shape.
            self.abort(report.abandoned(str(process)), now, effects)
            self.reset_membership(effects)
            owner = None
        start = self._start_of(process.rank, process.incarnation)
        returns = self._missed_last_release(process.rank, process.incarnation)
        last = start if returns else None
        self._owners.add(process, start, shape, last, self.first_sequence, effects)
        if owner is not None:
            self._withdraw(owner.process, process, effects)
        return start

    def refresh(self, rank: int) -> None:
        """Update what the group knows of a rank after one of its processes changed.

        Living owners must agree on one shape, and no barrier waits for a rank without living processes.
        """
        self._owners.refresh(rank)

    def record_state_change(self, rank: int, effects: Effects) -> None:
        """Make it durable that the owner of a rank died, or came back after it was taken for dead."""
        owner = self.owners.get(rank)
        if owner is not None:
            self._owners.record(owner, self.first_sequence, effects)

    def reset_membership(self, effects: Effects) -> None:
        """Remove all owners; the next sequence is the first of a new membership.

        Within a generation, a process of the old membership may still be alive behind a broken network. If
        it arrived at the newest release, it may hear that release until the next one.

        The caller has aborted the open barrier.
        """
        same_generation = self.generation == self._roster.generation
        released = self._last_release if same_generation else None
        self._owners.clear(self.first_sequence, released, effects)
        self.first_sequence = self.next_sequence
        if not same_generation:
            self.generation = self._roster.generation
            self._owners.forget_former(effects)
            self._history.trim_heard(self._kept_from, self.next_sequence, self.next_sequence, effects)
            self._last_release = None
        self._owners.refresh_all()
        effects.records.append(self.record)

    @property
    def record(self) -> GroupRecord:
        """The durable part of the group, beside its decisions and owners."""
        return GroupRecord(self.run_id, self.prefix, self.generation, self.first_sequence)

    def _withdraw(self, old: Process, newer: Process, effects: Effects) -> None:
        """Withdraw the arrival of an older incarnation at the open barrier, and tell it why."""
        if self.open is None or self.open.arrivals.get(old.rank) is not old:
            return
        self._history.count_bytes(-self.open.withdraw(old.rank))
        if old.session is not None:
            refusal = refusals.superseded(self.run_id, self.prefix, old, newer)
            effects.send(old.session, Refused(refusal, self.prefix, self.open.sequence, old.rank))

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
        """Count an arrival, or a repeated one. A decided sequence answers with its decision.

        Args:
            process: the process that arrives.
            sequence: the barrier; None: the next one of the rank.
            timeout: seconds; the first arrival's counts.
            arrival: the rank's arrival.
            now: the current time.
            effects: receives what follows.
            progress_after: seconds until the waiting ranks learn who is missing: at most, and for 0, half of
                the timeout.
            waited: seconds since the arrival was first sent, perhaps to an earlier coordinator.

        Raises:
            Refusal: the process does not own its rank, or the sequence or payload is refused.
        """
        owner = self.owners.get(process.rank)
        if owner is None or owner.process is not process:
            if owner is not None and owner.process.ordinal > process.ordinal:
                raise refusals.superseded(self.run_id, self.prefix, process, owner.process)
            raise refusals.not_joined(self.run_id, self.prefix, process)
        if sequence is None:
            sequence = self._next_of(owner)
        if sequence >= self.next_sequence:
            self._check_arrival(process, sequence, self.next_sequence, arrival)
            if self.open is None:
                owner.refused = sequence
                heard_until = self._check_unheard(owner.shape, process.rank, sequence)
                if heard_until > self._unheard_from:
                    self._history.trim_before(heard_until, effects)
                begin = sequence, owner.shape, timeout, progress_after, now.monotonic
                self.open = OpenBarrier.begin(*begin)
                self._timers.arm(self, self.open.due)
            since = now.monotonic - elapsed(waited, timeout) if waited else now.monotonic
            more = self.open.add(process, arrival, since, timeout, now.monotonic)
            if more:
                self._history.count_bytes(more)
            if waited:
                self._timers.arm(self, self.open.due)
            owner.last = sequence
            self._evaluate(owner, arrival, more, now, effects)
        else:
            answer(process, self._decided(process, owner.start, sequence), effects)
            owner.last = max(sequence, owner.last or 0)

    def check_unary_arrival(
        self,
        known: Process | None,
        incarnation: str,
        name: str,
        shape: Shape,
        sequence: int | None,
        arrival: Arrival,
        *,
        resets: bool,
    ) -> Decision | None:
        """Refuse a unary call that joins and arrives, before it does either.

        Args:
            known: the process of the call, if it has called before.
            incarnation: of the process if it belongs to the run's generation; else empty.
            name: of the process, for people.
            shape: the shape that it brings.
            sequence: the barrier; None: the next one.
            arrival: the rank's arrival.
            resets: whether the call resets the membership of the run, which aborts the open barrier.

        Returns:
            The decision that answers the call, if the call asks for one from before the reset. The call then
            joins nothing. None: the call may join and arrive.
        """
        self._check_shape(name, arrival.rank, shape)
        owner = self.owners.get(arrival.rank)
        own = owner if owner is not None and owner.process is known else None
        resets = (
            resets or self.generation != self._roster.generation or (own is None and self._owners.all_gone)
        )
        if known is not None:
            self.check_join(known, shape)
        upcoming = self.next_sequence + (resets and self.open is not None)
        returns = self._missed_last_release(arrival.rank, incarnation)
        if own is not None:
            start = own.start
        elif resets and not returns:
            start = upcoming
        else:
            start = self._start_of(arrival.rank, incarnation)
        if sequence is None:
            if own is not None:
                sequence = self._next_of(own)
            elif resets:
                # The call joins in any case. If it must hear a decision first, its next call gets further.
                sequence = upcoming
            else:
                sequence = max(start + returns, self._oldest)
        if sequence < self.next_sequence:
            decision = self._decided(name, start, sequence)
            return decision if resets else None
        if sequence < upcoming:
            return None  # The decision of the barrier that the reset aborts answers it.
        self._check_arrival(name, sequence, upcoming, arrival)
        if self.open is None and not resets:
            self._check_unheard(shape, arrival.rank, sequence)
        return None

    def _evaluate(
        self, owner: RankOwner, arrival: Arrival, more: int, now: Instant, effects: Effects
    ) -> None:
        """Decide the open barrier after an arrival if there is nothing left to wait for.

        Args:
            owner: of the rank that arrived.
            arrival: the rank's arrival.
            more: payload bytes that the arrival added.
            now: the current time.
            effects: receives the decision.
        """
        barrier = self.open
        assert barrier is not None
        failure = arrival.failure
        if failure is None and more:
            if barrier.payload_bytes <= self._limits.max_gather_bytes:
                limit = self._limits.total_gather_bytes(barrier.payload_bytes)
                self._gathered.reduce(limit, now, effects)
            overflow = refusals.payload_overflow(self.prefix, barrier, self._gathered.bytes, self._limits)
            failure = overflow.message if overflow is not None else None
        if failure is not None:
            process = owner.process
            reason = refusals.cut(failure, self._limits.max_reason_bytes)
            barrier.failures.append(Failure(process.rank, process.host, process.pid, reason))
            self._decide(Outcome.ABORTED, report.voted(barrier.failures), now, effects, process.rank)
            return
        if owner.shape is not barrier.shape or self._shapes.disagree:
            other = self._owners.find_disagreeing(owner, barrier.arrivals)
            if other is not None:
                why = refusals.describe_disagreement(
                    (owner.process, owner.shape), (other.process, other.shape)
                )
                self._decide(Outcome.MISMATCHED, why, now, effects)
                return
            # The rank that opened the barrier with another shape was superseded since.
            barrier.shape = owner.shape
        if barrier.complete:
            waited = now.monotonic - barrier.opened_at
            last = barrier.last_arrival_rank
            assert last is not None
            self._decide(Outcome.RELEASED, report.released(barrier.shape.size, waited, last), now, effects)
        elif self._gone_ranks:
            self.fail_if_rank_gone(now, effects)

    # ------------------------------------------------------------------ deciding

    def fail_if_rank_gone(self, now: Instant, effects: Effects) -> None:
        """Fail the open barrier if a rank that it still needs is gone."""
        barrier = self.open
        if barrier is None or not self._gone_ranks:
            return
        needed = [r for r in self._gone_ranks if r in barrier.shape and r not in barrier.arrivals]
        if needed:
            gone = self.missing(barrier, now, sorted(needed))
            self._decide(Outcome.MEMBER_LOST, report.member_lost(gone), now, effects, gone[0].rank)

    def abort(self, reason: str, now: Instant, effects: Effects) -> Decision | None:
        """Abort the open barrier for all ranks. Returns the decision; None if no barrier is open."""
        if self.open is None:
            return None
        reason = refusals.cut(reason, self._limits.max_reason_bytes)
        return self._decide(Outcome.ABORTED, report.aborted(reason), now, effects)

    def on_time(self, now: Instant, effects: Effects) -> None:
        """Probe the missing ranks, report them to the waiting ranks, or time the barrier out, as is due."""
        barrier = self.open
        if barrier is None:
            return
        if now.monotonic >= barrier.deadline:
            self._decide(Outcome.TIMED_OUT, report.timed_out(barrier.timeout), now, effects)
            return
        if now.monotonic >= barrier.due and not barrier.probed:
            barrier.probed = True
            missing = (
                process_to_name(rank, self.owners.get(rank), self._roster)
                for rank in barrier.shape
                if rank not in barrier.arrivals
            )
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
        """Give the open barrier its outcome; no other place does. ``suspect`` is the rank to check first."""
        barrier = self.open
        assert barrier is not None
        assert barrier.sequence == self.next_sequence
        self.open = None
        self._history.count_bytes(-barrier.payload_bytes)
        self.next_sequence += 1
        released = outcome is Outcome.RELEASED
        missing = () if released else tuple(self.missing(barrier, now, barrier.shape))
        if suspect is None and missing:
            suspect = missing[0].rank
        required = barrier.shape.size
        # Not the number of arrivals: a rank that disagrees may not be in the shape.
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
        self._history.add(decision)
        effects.records.append(decision)
        effects.decisions.append(decision)
        # Keep no more decisions from before the last reset than ranks may have missed since then.
        self._history.trim(self._limits.unheard_decisions(required), self._unheard_from, effects)
        receivers = audience(barrier.arrivals.values())
        if receivers:
            effects.deliveries.append(Delivery(receivers, decision))
        if released:
            self._released(barrier, effects)
        if barrier.reports:
            self._checkpoints.record_decision(decision, why, barrier, effects)
        return decision

    def _released(self, barrier: OpenBarrier, effects: Effects) -> None:
        kept_from, self._last_release = self._kept_from, barrier.sequence
        self._history.trim_heard(kept_from, barrier.sequence, self.next_sequence, effects)
        self._owners.forget_former(effects)
        if len(self.owners) == len(barrier.arrivals):
            return
        for rank, owner in self.owners.items():
            if rank not in barrier.arrivals:
                # The barrier did not need this rank, so it must not hear the release as if it had arrived.
                owner.start = barrier.sequence + 1
                self._owners.record(owner, self.first_sequence, effects)

    # ------------------------------------------------------------------ reporting

    def missing(self, barrier: OpenBarrier, now: Instant, ranks: Iterable[int]) -> list[MissingRank]:
        """Return each of ``ranks`` that has not arrived, with the reason."""
        arrivals = barrier.arrivals
        return [
            missing_rank(rank, self.owners.get(rank), self._roster, now.monotonic)
            for rank in ranks
            if rank not in arrivals
        ]

    def progress(self, barrier: OpenBarrier, now: Instant) -> Progress:
        """Return how many ranks have arrived at the open barrier, and which are missing."""
        missing = tuple(self.missing(barrier, now, barrier.shape))
        arrived, required = len(barrier.arrivals), barrier.shape.size
        name = report.barrier_name(self.run_id, self.prefix, barrier.sequence)
        waited = now.monotonic - barrier.opened_at
        message = report.progress(name, waited, arrived, required, missing)
        return Progress(self.prefix, barrier.sequence, arrived, required, missing, message)

    # ------------------------------------------------------------------ checking

    def _check_arrival(self, process: Process | str, sequence: int, upcoming: int, arrival: Arrival) -> None:
        """Refuse an arrival after the next barrier, or with too large a payload, before a barrier opens."""
        if sequence > upcoming:
            raise refusals.sequence_ahead(self.prefix, process, sequence, upcoming)
        size, most = len(arrival.payload), self._limits.max_payload_bytes
        if size > most:
            raise limit_exceeded(
                "max_payload_bytes",
                most,
                f'{process} sent {size:,} bytes with its arrival at "{self.prefix}" #{upcoming}',
            )
