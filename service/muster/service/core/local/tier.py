"""The local checkpoints of one run. It applies what keepers and ranks say, and decides levels and recoveries.

It keeps invariant 21 (one recovery decision for each round) and
invariant 22 (copies are verified before use).
"""

from collections.abc import Iterable
from dataclasses import replace

from muster.service.core.local import refusals
from muster.service.core.local.copies import Copies
from muster.service.core.local.dispatch import Dispatch
from muster.service.core.local.keepers import Keeper, Keepers
from muster.service.core.local.levels import is_replicated
from muster.service.core.local.orders import ANY_PART, committer, peers_of
from muster.service.core.local.recovery import PendingRecovery, choose
from muster.service.core.local.selection import surplus, unsettled, unsettled_before
from muster.service.core.local.turns import PersistTurns
from muster.service.core.timers import WakeUps
from muster.service.core.vocabulary.effects import Effects, Notice, Refused
from muster.service.core.vocabulary.local import (
    Attachment,
    Attempt,
    CommitLocal,
    ConnectKeeper,
    ForgetLocalCheckpoint,
    Holding,
    Level,
    LocalCheckpointRecord,
    LocalCommitted,
    Permit,
    Permitted,
    Recover,
    Recovered,
    RecoveryRecord,
    ReportKeeper,
    ReportTaken,
    RequestPermit,
)
from muster.service.core.vocabulary.model import Instant, SessionId
from muster.service.core.vocabulary.refusal import Refusal

ORDERS_PAUSE = 0.05
"""Seconds for which orders are collected after a keeper was lost."""


class LocalTier:
    """The local checkpoints of one run.

    Args:
        run_id: the run.
        timers: wakes it.
    """

    def __init__(self, run_id: str, timers: "WakeUps[LocalTier]") -> None:
        self.run_id = run_id
        self.keepers = Keepers()
        self.recovery: RecoveryRecord | None = None
        """The last decision."""
        self._copies: dict[Attempt, Copies] = {}
        self._timers = timers
        self._token = ""
        self._pending: PendingRecovery | None = None
        self._waiting: dict[SessionId, tuple[Attempt, Level]] = {}
        """The commits that wait for a level."""
        self._persisting: Attempt | None = None
        """The checkpoint that keepers are told to persist."""
        self._turns = PersistTurns()
        self._dispatch = Dispatch(self.keepers)

    # ------------------------------------------------------------------ what there is

    @property
    def copies(self) -> list[Copies]:
        """The checkpoints that are kept, from the oldest to the newest."""
        return [self._copies[attempt] for attempt in sorted(self._copies)]

    @property
    def sessions(self) -> list[SessionId]:
        """The streams and calls that wait here."""
        streams = [keeper.session for keeper in self.keepers if keeper.session is not None]
        waiters = list(self._pending.waiters) if self._pending is not None else []
        return [*streams, *waiters, *self._waiting]

    @property
    def in_use(self) -> bool:
        """Whether a keeper is connected, or a call waits."""
        return bool(self.sessions)

    @property
    def newest(self) -> Attempt | None:
        """The newest attempt that was ever committed."""
        known = [max(self._copies)] if self._copies else []
        if self.recovery is not None and self.recovery.newest is not None:
            known.append(self.recovery.newest)
        return max(known, default=None)

    @property
    def _floor(self) -> Attempt:
        """The last attempt that may not be committed: later ones are of the present life of the job."""
        recovered = self.recovery.generation if self.recovery is not None else 0
        generation = max(self.keepers.generation, recovered)
        known, over = self.newest, Attempt(generation, -1)
        return over if known is None else max(known, over)

    @property
    def _resumed(self) -> Attempt | None:
        """The checkpoint that the current generation resumes from."""
        recovery = self.recovery
        if recovery is None or recovery.generation != self.keepers.generation:
            return None
        return recovery.attempt

    def restore(self, record: LocalCheckpointRecord) -> None:
        """Restore a checkpoint."""
        self._copies[record.checkpoint.attempt] = Copies(record, is_restored=True)

    def restore_recovery(self, record: RecoveryRecord) -> None:
        """Restore the last decision."""
        self.recovery = record

    def end(self) -> None:
        """Cancel the timer, because the run was removed."""
        self._timers.disarm(self)

    # ------------------------------------------------------------------ keepers

    def connect(self, event: ConnectKeeper, now: Instant, effects: Effects) -> SessionId | None:
        """Take in a keeper. Returns the session that it replaces."""
        known = self.keepers.find(event.keeper.id)
        replaced = known.session if known is not None else None
        if known is not None and replaced is not None:
            effects.send(replaced, Refused(refusals.keeper_replaced(self.run_id, known.info), final=True))
            self._lose(known, effects)
        self._token = self._token or event.new_token
        keeper = self.keepers.add(event.keeper)
        keeper.session, keeper.sent = event.session, None
        keeper.asked = keeper.confirmed = 0
        self._dispatch.forget_locations()
        keeper.holdings, keeper.transfers = {}, event.transfers
        keeper.disk = event.disk
        if any(one.record.keeper_id == keeper.info.id for one in self._copies.values()):
            self._dispatch.mark_all()  # It may have manifests that others need.
        self._set_holdings(keeper, {one.attempt: one for one in event.holdings}, effects)
        if event.attachment is not None:
            self._attach(keeper, event.attachment)
        self._tell_peers(keeper, effects)
        self._review(now, effects)
        return replaced

    def report(self, event: ReportKeeper, keeper: Keeper, now: Instant, effects: Effects) -> None:
        """Take in what has changed on a keeper."""
        keeper.confirmed = event.confirmed
        if event.disk is not None:
            keeper.disk = event.disk
        keeper.transfers = event.transfers or keeper.transfers
        changed = {**keeper.holdings, **{one.attempt: one for one in event.holdings}}
        self._set_holdings(keeper, changed, effects)
        if event.attachment is not None and self._attach(keeper, event.attachment):
            self._tell_peers(keeper, effects)
        self._review(now, effects)
        effects.send(event.session, ReportTaken())

    def disconnect(self, session: SessionId, now: Instant, effects: Effects) -> None:
        """A stream or a call has ended."""
        self._waiting.pop(session, None)
        if self._pending is not None:
            # The decision stays pending: its ranks call again, and must not wait from the beginning.
            self._pending.waiters.discard(session)
        for keeper in self.keepers:
            if keeper.session == session:
                keeper.session = keeper.sent = None
                if self._pending is not None:
                    self._pending.lost_at = now.monotonic
                self._dispatch.forget_locations()
                self._lose(keeper, effects)
                self.keepers.remove_if_unused(keeper)
                self._dispatch.mark_all()
                # Many keepers may be lost at once, as at a job's end. One round of orders is enough for them.
                self._timers.arm(self, now.monotonic + ORDERS_PAUSE)
                self._decide(now, effects)
                return

    def _lose(self, keeper: Keeper, effects: Effects) -> None:
        """The stream of a keeper is over, and it may come back without what it had."""
        for copies in self._copies.values():
            copies.is_fresh &= copies.record.keeper_id != keeper.info.id
        self._set_holdings(keeper, {}, effects)

    def _attach(self, keeper: Keeper, attachment: Attachment) -> bool:
        """Attach a keeper to ranks. Returns whether that changes anything."""
        before = self.keepers.ranks_of(keeper.info.id)
        if not self.keepers.attach(keeper, attachment):
            return False
        self._mark_persisting(before | attachment.ranks)
        return True

    def _mark_persisting(self, ranks: Iterable[int]) -> None:
        """Another keeper may be the one that persists the parts of these ranks."""
        persisting = self._copies.get(self._persisting) if self._persisting is not None else None
        if persisting is not None:
            for rank in ranks:
                for holder in persisting.holders[rank] if rank < len(persisting.holders) else ():
                    self._dispatch.mark_dirty(holder)

    def _tell_peers(self, keeper: Keeper, effects: Effects) -> None:
        """Tell the keepers of each other: all of them once each rank has one, or the one that has come."""
        attachment = keeper.attachment
        is_covered = attachment is not None and self.keepers.covers(attachment.world_size)
        addressed = [keeper]
        if is_covered and self.keepers.is_current(keeper):
            if self.keepers.place():
                self._dispatch.mark_all()
            addressed = self.keepers.connected()
        peers = peers_of(self.keepers, self._token)
        for one in addressed:
            if one.session is not None:
                effects.send(one.session, peers)

    def _set_holdings(self, keeper: Keeper, holdings: dict[Attempt, Holding], effects: Effects) -> None:
        before = keeper.holdings
        gained: set[tuple[Attempt, int]] = set()
        keeper.holdings = {attempt: one for attempt, one in holdings.items() if one.ranks}
        for attempt in before.keys() | keeper.holdings.keys():
            was, now_has = before.get(attempt), keeper.holdings.get(attempt)
            copies = self._copies.get(attempt)
            if copies is None or was == now_has:
                continue
            copies.change(keeper.info.id, was, now_has)
            self._dispatch.forget_locations(attempt)
            had, has = copies.counts(was), copies.counts(now_has)
            if had - has:
                # It may be the source of others, and may have lost the manifest.
                copies.is_fresh &= copies.record.keeper_id != keeper.info.id
                self._dispatch.mark_all()
            if more := has - had:
                gained.update((attempt, rank) for rank in (*more, ANY_PART))
            if attempt == self._persisting:
                self._mark_persisting(more)
            self._raise_level(copies, now_has, effects)
        for concerned in (keeper.info.id, *self.keepers.placement.get(keeper.info.id, ())):
            self._dispatch.mark_dirty(concerned)
        self._dispatch.mark_starving(gained)

    # ------------------------------------------------------------------ checkpoints

    def commit(self, event: CommitLocal, now: Instant, effects: Effects) -> None:
        """Make a checkpoint that all ranks have written.

        Raises:
            Refusal: ATTEMPT_SUPERSEDED.
        """
        checkpoint = event.checkpoint
        copies = self._copies.get(checkpoint.attempt)
        if copies is None or copies.checkpoint != checkpoint:
            if checkpoint.attempt <= self._floor:
                raise refusals.attempt_superseded(self.run_id, checkpoint.attempt)
            permit = Permit.NONE if event.keeper_id else Permit.GIVEN
            record = LocalCheckpointRecord(
                self.run_id, checkpoint, Level.LOCAL, event.keeper_id, now.wall, permit=permit
            )
            copies = self._copies[checkpoint.attempt] = Copies(record)
            effects.records.append(record)
            for keeper in self.keepers.connected():
                copies.is_fresh |= keeper.info.id == event.keeper_id
                copies.change(keeper.info.id, None, keeper.holdings.get(checkpoint.attempt))
            self._raise_level(copies, None, effects)
            self._dispatch.mark_all()
        if copies.is_in_shared_storage_alone:
            self._raise_level(copies, None, effects, event.persisted_as)
            effects.send(
                event.session, LocalCommitted(copies.level, unsettled_before(self.copies, copies.attempt))
            )
        elif copies.level >= event.wait_for:
            effects.send(event.session, LocalCommitted(copies.level))
        else:
            self._waiting[event.session] = checkpoint.attempt, event.wait_for
        self._review(now, effects)

    def permit(self, event: RequestPermit, now: Instant, effects: Effects) -> None:
        """Permit a keeper to commit a checkpoint in shared storage.

        Raises:
            Refusal: ATTEMPT_SUPERSEDED.
        """
        copies = self._copies.get(event.attempt)
        if copies is None or (event.attempt != self._persisting and copies.level < Level.PERSISTED):
            raise refusals.permit_refused(self.run_id, event.attempt)
        if copies.level < Level.PERSISTED:
            self._set_permit(copies, Permit.GIVEN, effects)
        effects.send(event.session, Permitted(unsettled_before(self.copies, copies.attempt)))
        self._review(now, effects)

    def _set_permit(self, copies: Copies, permit: Permit, effects: Effects) -> None:
        if copies.record.permit is not permit:
            copies.record = replace(copies.record, permit=permit)
            effects.records.append(copies.record)

    def _raise_level(
        self, copies: Copies, holding: Holding | None, effects: Effects, persisted_as: str = ""
    ) -> None:
        """Decide the level of a checkpoint, if it has become safer."""
        record = copies.record
        if holding is not None and copies.counts(holding):
            persisted_as = persisted_as or holding.persisted_as
        if persisted_as:
            record = replace(record, level=Level.PERSISTED, persisted_as=persisted_as)
        if record.level < Level.REPLICATED and is_replicated(copies, self.keepers):
            record = replace(record, level=Level.REPLICATED)
        if record.level <= copies.level:
            return
        copies.record = record
        effects.records.append(record)
        reason = f"step {record.checkpoint.step} is {record.level.name}"
        effects.notices.append(Notice("checkpoint.level", self.run_id, reason))
        self._dispatch.mark_all()
        for session, (attempt, wanted) in list(self._waiting.items()):
            if attempt == copies.attempt and record.level >= wanted:
                del self._waiting[session]
                effects.send(session, LocalCommitted(record.level))

    def _drop(self, copies: Copies, effects: Effects) -> None:
        del self._copies[copies.attempt]
        effects.records.append(ForgetLocalCheckpoint(self.run_id, copies.attempt))
        self._dispatch.mark_all()

    # ------------------------------------------------------------------ recovery

    def recover(self, event: Recover, now: Instant, effects: Effects) -> None:
        """Answer what to resume from, at once or when it is decided.

        Raises:
            Refusal: RECOVERY_SUPERSEDED or RECOVERY_MISMATCHED.
        """
        asked, last = (event.generation, event.number), self.recovery
        if last is not None and asked == (last.generation, last.number):
            if event.world_size != last.world_size:
                raise refusals.recovery_mismatched(self.run_id, *asked, last.world_size, event.world_size)
            answer = self._answer(last)
            if answer is None:
                raise refusals.recovery_superseded(self.run_id, *asked)
            effects.send(event.session, answer)
            return
        decided = (last.generation, last.number) if last is not None else (-1, -1)
        pending = self._pending
        if asked < decided or (pending is not None and asked < (pending.generation, pending.number)):
            raise refusals.recovery_superseded(self.run_id, *asked)
        if pending is not None and asked != (pending.generation, pending.number):
            self._refuse_pending(pending, effects)
            pending = None
        if pending is None:
            pending = self._pending = PendingRecovery(*asked, event.world_size, event.without_local)
            self._settle(event.absent, effects)
        if pending.world_size != event.world_size:
            refusal = refusals.recovery_mismatched(self.run_id, *asked, pending.world_size, event.world_size)
            self._refuse_pending(pending, effects, refusal)
            raise refusal
        pending.waiters.add(event.session)
        self._review(now, effects)

    def on_time(self, now: Instant, effects: Effects) -> None:
        """A decision need not wait any longer."""
        self._review(now, effects)

    def _decide(self, now: Instant, effects: Effects) -> None:
        pending = self._pending
        if pending is None:
            return
        if pending.generation < self.keepers.generation:
            self._refuse_pending(pending, effects)
            return
        is_covered = pending.generation == self.keepers.generation and self.keepers.covers(pending.world_size)
        if not is_covered:
            pending.covered_at = None
            return
        if pending.covered_at is None:
            pending.covered_at = now.monotonic
        if not pending.waiters:
            return
        copies = self.copies
        is_verified = self._dispatch.is_all_verified
        waits_until = pending.waits_until(is_verified=is_verified)
        # Use the timer's own sum: a rounding difference would re-arm it endlessly.
        may_wait = now.monotonic < waits_until
        choice = choose(copies, may_wait=may_wait, without_local=pending.without_local)
        if choice is None:
            self._dispatch.ask(copies)
            self._timers.arm(self, waits_until)
            return
        self.recovery = RecoveryRecord(
            self.run_id,
            pending.generation,
            pending.number,
            pending.world_size,
            choice.attempt,
            choice.reason,
            self.newest,
        )
        effects.records.append(self.recovery)
        effects.notices.append(Notice("checkpoint.recovery", self.run_id, choice.reason))
        # Training goes on from this one: what is newer is abandoned, also if its parts appear again.
        for one in copies:
            if choice.last is None or one.attempt > choice.last:
                self._drop(one, effects)
                self._refuse_waiting(one, effects)
        for one in choice.doubtful:
            self._set_permit(one, Permit.WITHDRAWN, effects)
        answer = self._answer(self.recovery)
        assert answer is not None
        for waiter in pending.waiters:
            effects.send(waiter, answer)
        self._end_pending()
        self._dispatch.mark_all()

    def _settle(self, absent: Iterable[Attempt], effects: Effects) -> None:
        """The ranks have made sure that attempts are not in shared storage, and never will be."""
        for attempt in absent:
            copies = self._copies.get(attempt)
            if copies is not None and copies.is_unsettled:
                self._set_permit(copies, Permit.NONE, effects)
                if copies.is_in_shared_storage_alone:
                    self._drop(copies, effects)

    def _refuse_pending(
        self, pending: PendingRecovery, effects: Effects, refusal: Refusal | None = None
    ) -> None:
        refusal = refusal or refusals.recovery_superseded(self.run_id, pending.generation, pending.number)
        for waiter in pending.waiters:
            effects.send(waiter, Refused(refusal))
        self._end_pending()

    def _end_pending(self) -> None:
        self._pending = None
        self._dispatch.stop_asking()

    def _refuse_waiting(self, copies: Copies, effects: Effects) -> None:
        for session, (attempt, _) in list(self._waiting.items()):
            if attempt == copies.attempt:
                del self._waiting[session]
                effects.send(session, Refused(refusals.attempt_superseded(self.run_id, attempt)))

    def _answer(self, record: RecoveryRecord) -> Recovered | None:
        """Return a decision as ranks hear it; None: its checkpoint is gone, since all have gone on."""
        if record.attempt is None:
            # A keeper may have reported meanwhile that it has committed one. Rank 0 finds it, too.
            doubtful = [one for one in unsettled(self.copies) if one.record.permit is Permit.WITHDRAWN]
            return Recovered(None, record.reason, tuple(one.checkpoint for one in doubtful))
        copies = self._copies.get(record.attempt)
        return None if copies is None else Recovered(copies.checkpoint, record.reason)

    # ------------------------------------------------------------------ orders

    def _review(self, now: Instant, effects: Effects) -> None:
        """After each event: send the orders that have changed, and decide what is due."""
        self._update_orders(now, effects)
        # Keepers look for what they can verify by their orders. The decision waits for that.
        self._decide(now, effects)
        if self._dispatch.has_marked:
            self._update_orders(now, effects)

    def _update_orders(self, now: Instant, effects: Effects) -> None:
        for one in surplus(self.copies, is_alone=len(self.keepers.current()) == 1):
            self._drop(one, effects)
            self._refuse_waiting(one, effects)
        copies = self.copies
        persisting = self._turns.next(copies, now.monotonic, effects.notices, self.run_id)
        if (until := self._turns.due(now.monotonic)) is not None:
            self._timers.arm(self, until)
        if (attempt := persisting.attempt if persisting is not None else None) != self._persisting:
            self._persisting = attempt
            self._dispatch.mark_all()
        if persisting is not None and persisting.is_all_persisted:
            self._dispatch.mark_dirty(committer(persisting))
        self._dispatch.send(self._copies, self._resumed, self.newest, persisting, effects)
