"""The requested save of a run: all ranks save at one step, or none does.

The ranks agree on the step at a barrier of the group ``PREFIX``, where each rank hands in the last step that
it may reach. They confirm the save at the next barrier of that group. So the rules of barriers cover failures
of ranks. This module keeps the request, and reads from each release what became of it.
"""

from dataclasses import replace

from muster.client.save_votes import PREFIX, Phase, SaveVote, parse_vote
from muster.service.core.barriers.barrier import OpenBarrier
from muster.service.core.barriers.group import Group
from muster.service.core.barriers.observations import PROBE_LEAD
from muster.service.core.barriers.refusals import cut
from muster.service.core.elapsed import RECONNECT_GRACE
from muster.service.core.membership.process import audience
from muster.service.core.membership.roster import Roster
from muster.service.core.saves.deadlines import Due, due_at, due_in, earlier, replaces
from muster.service.core.saves.late_ranks import late_ranks, probe_targets
from muster.service.core.saves.notices import (
    key_of,
    moved,
    of_covered,
    request_of,
    with_notice,
    without_request,
)
from muster.service.core.saves.votes import released_votes
from muster.service.core.timers import WakeUps
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import Delivery, Effects, Notice, ProbeRequest, SaveAsked
from muster.service.core.vocabulary.events import RequestSave
from muster.service.core.vocabulary.model import CoveredSave, Decision, Instant, Save, SaveState
from muster.service.core.vocabulary.records import SaveRecord
from muster.service.core.vocabulary.refusal import Reason, Refusal

MAX_LATE_BYTES = 4096
"""Bytes of the sentence that names the ranks that are late; the rest is cut."""


class Saving:
    """The requested save of one run.

    Args:
        run_id: the run.
        groups: the run's groups, by prefix.
        roster: its processes.
        timers: wakes it at the deadline of a request.
    """

    def __init__(
        self, run_id: str, groups: dict[str, Group], roster: Roster, timers: "WakeUps[Saving]"
    ) -> None:
        self.run_id = run_id
        self.save: Save | None = None
        """The newest request."""
        self._timers = timers
        self._due: Due | None = None
        """The deadline of the newest request."""
        self._probed = False
        """Whether the ranks were probed before that deadline."""
        self._reports_from = float("-inf")
        """When ranks may be named as late, on the monotonic clock: not before they could connect again."""
        self._groups = groups
        self._roster = roster
        self._seen: int | None = None
        """The group's next sequence when this object last read its newest decision."""

    def restore(self, record: SaveRecord, now: Instant) -> None:
        """Restore the request, after the group, whose decisions were applied before the restart."""
        self.save = record.save
        self._seen = self._next_sequence
        self._due = due_at(record.save.deadline, now)
        self._reports_from = now.monotonic + RECONNECT_GRACE
        self._arm(now)

    def asked(self, now: Instant) -> SaveAsked | None:
        """Return the message for a process that connects. If it is over, later ones are told apart by it."""
        return None if self.save is None else self._announcement(self.save, now)

    def request(self, ask: RequestSave, generation: int, now: Instant, effects: Effects) -> bool:
        """Request a save.

        A pending request of the same generation covers the new one, with two exceptions: the ranks failed to
        agree on it, or the new one ends training and the pending one does not. Then the new one replaces it.

        Args:
            ask: the request. If its caller had not heard of the newest request, that covers it.
            generation: the generation of the processes that it is for.
            now: the current time.
            effects: receives what follows.

        Returns:
            Whether an earlier request covers this one. Then at most its validity was extended.
        """
        last = self.save
        notice = key_of(ask.notice, stop=ask.stop)
        if last is not None and self._covers(last, ask, notice, generation):
            heeded_by = request_of(last.notices, notice)
            if heeded_by in (None, last.number):
                self._extend(last, ask, notice, now, effects)
            else:
                assert heeded_by is not None
                self.save = replace(last, notices=with_notice(last.notices, notice, heeded_by))
            return True
        number = last.number + 1 if last is not None else 1
        asked = Save(
            number,
            SaveState.ASKED,
            ask.stop,
            ask.by,
            ask.reason,
            now.wall,
            self._next_sequence,
            generation=generation,
            across_generations=ask.across_generations,
        )
        due = due_in(ask.deadline, now)
        if last is not None:
            asked = replace(asked, notices=last.notices)
            if last.state.stands:
                asked, due = self._replace(last, asked, notice, due, now)
        self._due = due
        kept = with_notice(asked.notices, notice, number)
        asked = replace(asked, deadline=due.wall if due is not None else None, notices=kept)
        self._keep(asked, effects)
        self._tell(asked, now, effects)
        self._arm(now)
        ending = ", and training is to end" if asked.stop else ""
        text = f"was asked for by {report.shown(ask.by)}{ending}{_because(ask.reason)}"
        self._note("asked", text, effects)
        return False

    def _covers(self, last: Save, ask: RequestSave, notice: str, generation: int) -> bool:
        """Whether an earlier request covers another one."""
        outdated = self._is_outdated(last, generation)
        failed = last.state.stands and (outdated or self._failed(last))
        if (number := request_of(last.notices, notice)) is not None:
            # Whatever became of that request: the notice was heeded once.
            return number < last.number or not failed
        if last.stop < ask.stop or outdated:
            return False
        if last.state.stands and not failed:
            return True
        unheard = ask.known is not None and last.number > ask.known
        return unheard and last.generation == generation and last.state is not SaveState.LAPSED

    def _is_outdated(self, last: Save, generation: int) -> bool:
        """Whether the newest request is not for a generation.

        Ranks that agreed on a save still make it, even if a newer round forms meanwhile.
        """
        makes_it = last.state is SaveState.AGREED and self._roster.generation <= last.generation
        return last.lapses_before(generation) and (not makes_it or self._failed(last))

    def _replace(
        self, pending: Save, asked: Save, notice: str, due: Due | None, now: Instant
    ) -> tuple[Save, Due | None]:
        """Let a new request take over what a pending one asks for beyond it.

        Args:
            pending: the pending request.
            asked: the new request.
            notice: the key of its notice.
            due: its deadline.
            now: the current time.

        Returns:
            The request, and its deadline.
        """
        covered = pending.covered
        if covered is None and not pending.stop:
            covered = CoveredSave(pending.by, pending.reason, pending.deadline)
        if self._is_outdated(pending, asked.generation):
            notices = without_request(pending.notices, pending.number)
        else:
            notices = moved(pending.notices, pending.number, asked.number)
            if request_of(pending.notices, notice) is not None:
                # The same notice: its deadline stays, and the ranks that missed it were named.
                due, asked = self._due, replace(asked, late=pending.late)
            else:
                due = earlier(due, self._due, now)
            if pending.stop and not asked.stop:
                covered = covered or CoveredSave(asked.by, asked.reason, due.wall if due else None)
            asked = replace(
                asked,
                stop=asked.stop or pending.stop,
                across_generations=asked.across_generations or pending.across_generations,
            )
        return replace(asked, notices=notices, covered=covered if asked.stop else None), due

    def _extend(self, last: Save, ask: RequestSave, notice: str, now: Instant, effects: Effects) -> None:
        """Add to the newest request what a request that it covers asks for beyond it."""
        repeated = request_of(last.notices, notice) is not None
        self.save = last = replace(last, notices=with_notice(last.notices, notice, last.number))
        extended = last
        due = due_in(ask.deadline, now)
        if last.state.stands:
            across = last.across_generations or ask.across_generations
            covered = last.covered
            if last.stop and not ask.stop and covered is None:
                covered = CoveredSave(ask.by, ask.reason, due.wall if due is not None else None)
            extended = replace(last, across_generations=across, covered=covered)
            if replaces(due, self._due, now, repeated=repeated):
                assert due is not None
                self._due = due
                extended = replace(extended, deadline=due.wall, late="")
        if extended != last or (notice and not repeated):
            self._keep(extended, effects)
        if extended.deadline != last.deadline:
            self._tell(extended, now, effects)
            self._arm(now)

    def heed(self, notice: str, *, stop: bool, effects: Effects) -> None:
        """Count a notice as heeded by the newest request, because the run stopped for that.

        Args:
            notice: the id of the notice, or empty.
            stop: whether it asks for the end of training.
            effects: receives what follows.
        """
        key = key_of(notice, stop=stop)
        if self.save is not None and key and request_of(self.save.notices, key) is None:
            kept = with_notice(self.save.notices, key, self.save.number)
            self._keep(replace(self.save, notices=kept), effects)

    def withdraw(self, reason: str, now: Instant, effects: Effects) -> Save:
        """Withdraw the pending request. Ranks that have agreed on a step still save at it.

        Returns:
            The withdrawn request.

        Raises:
            Refusal: NO_SAVE_ASKED.
        """
        last = self.save
        if last is None or not last.state.stands:
            raise Refusal(
                Reason.NO_SAVE_ASKED,
                f"no save of run {self.run_id} is asked for, so none was withdrawn. "
                f"Look at it with: {report.command('describe run', self.run_id)}",
            )
        withdrawn = replace(last, state=SaveState.WITHDRAWN, ended_at=now.wall)
        self._keep(withdrawn, effects)
        self._tell(withdrawn, now, effects)
        self._note("withdrawn", f"was withdrawn{_because(reason)}", effects)
        self.apply_decision(now, effects)
        return withdrawn

    def apply_decision(self, now: Instant, effects: Effects) -> Save | None:
        """Apply a new release of the group, or abort its barrier if no request needs it.

        Returns:
            The save that all ranks have now confirmed, if training ends after it.
        """
        group = self._groups.get(PREFIX)
        if group is None:
            return None
        if group.open is not None:
            if not self._is_of_use(group.open):
                group.abort("no save is asked for any longer", now, effects)
        elif self._seen != group.next_sequence:
            self._seen = group.next_sequence
            votes = released_votes(_newest(group))
            if votes and self.save is not None and max(vote.number for vote in votes) >= self.save.number:
                self._apply_release(self.save, votes, now, effects)
                if votes[0].phase is Phase.DONE and any(vote.stop for vote in votes):
                    return self.save
        return None

    def _is_of_use(self, barrier: OpenBarrier) -> bool:
        """Whether a request is pending, or the ranks confirm a save that they agreed on."""
        if self.save is not None and self.save.state.stands:
            return True
        vote = next((parse_vote(payload) for payload in barrier.payloads.values()), None)
        return vote is not None and vote.phase is Phase.DONE

    def _apply_release(self, save: Save, votes: list[SaveVote], now: Instant, effects: Effects) -> None:
        step = max(vote.step for vote in votes)
        if votes[0].phase is Phase.DONE:
            # Ranks that agreed on a request to stop stop, even if it was withdrawn since.
            stop = save.stop or any(vote.stop for vote in votes)
            self._keep(replace(save, state=SaveState.DONE, stop=stop, step=step, ended_at=now.wall), effects)
            took = report.seconds(max(0.0, now.wall - save.asked_at))
            self._note("done", f"was done by all ranks at step {step}, {took} after it was asked", effects)
        elif save.state is SaveState.ASKED:
            self._keep(replace(save, state=SaveState.AGREED, step=step), effects)
            self._note("agreed", f"was agreed on: all ranks save at step {step}", effects)

    def renew(self, over: int, now: Instant, effects: Effects) -> None:
        """Hand a pending request to the processes that replace those that were asked, or let it lapse.

        Args:
            over: the newest generation that is over. A request that ends training is for its own generation,
                so that a job that starts again does not end at once.
            now: the current time.
            effects: receives what follows.
        """
        if self.save is None or not self.save.state.stands:
            return
        if self.save.lapses_before(over + 1):
            lapsed, notices = self.save, self.save.notices
            left = without_request(notices, lapsed.number)
            self._keep(replace(lapsed, state=SaveState.LAPSED, ended_at=now.wall, notices=left), effects)
            self._note("lapsed", f"lapsed, because generation {lapsed.generation} is over", effects)
            if (covered := lapsed.covered) is not None:
                goes_on = replace(
                    self.save,
                    number=lapsed.number + 1,
                    stop=False,
                    by=covered.by,
                    reason=covered.reason,
                    asked_at=now.wall,
                    ended_at=None,
                    covered=None,
                    deadline=covered.deadline,
                    notices=of_covered(notices, lapsed.number, lapsed.number + 1),
                )
                self._due = due_at(covered.deadline, now)
                self._ask_again(goes_on, now, effects)
        else:
            self._ask_again(self.save, now, effects)

    def _ask_again(self, save: Save, now: Instant, effects: Effects) -> None:
        """Ask the processes of a newer generation, or of the job that starts again, for a save.

        A deadline that has passed was that of the processes before.
        """
        if self._due is not None and self._due.at <= now.monotonic:
            self._due = None
        deadline = self._due.wall if self._due is not None else None
        since = self._next_sequence
        self._keep(
            replace(save, state=SaveState.ASKED, step=None, since=since, deadline=deadline, late=""), effects
        )
        self._arm(now)

    @property
    def _next_sequence(self) -> int:
        group = self._groups.get(PREFIX)
        return group.next_sequence if group is not None else 0

    def _failed(self, save: Save) -> bool:
        """Whether the ranks tried to agree on this request and failed."""
        group = self._groups.get(PREFIX)
        last = _newest(group) if group is not None else None
        return last is not None and last.sequence >= save.since and not released_votes(last)

    def on_time(self, now: Instant, effects: Effects) -> None:
        """Probe the ranks that have not saved shortly before the deadline, and name them at the deadline."""
        save, reports_at = self.save, self._reports_at
        if save is None or reports_at is None:
            return
        group = self._groups.get(PREFIX)
        if now.monotonic >= reports_at:
            if not self._roster.deserted:
                self._report_late(save, group, now, effects)
            return
        if now.monotonic >= reports_at - PROBE_LEAD and not self._probed:
            self._probed = True
            targets = probe_targets(group, self._roster)
            effects.probes.append(ProbeRequest(self.run_id, targets, reports_at - now.monotonic))
        self._timers.arm(self, reports_at if self._probed else reports_at - PROBE_LEAD)

    def _report_late(self, save: Save, group: Group | None, now: Instant, effects: Effects) -> None:
        ranks = late_ranks(group, self._roster, now.monotonic)
        agreed = save.state is SaveState.AGREED
        late = cut(report.late_save(ranks.named, ranks.total, agreed=agreed), MAX_LATE_BYTES)
        self._keep(replace(save, late=late), effects)
        # Without an open barrier, no rank is missing from one, and all ranks are late.
        open_barrier = group is not None and group.open is not None
        stacks = report.command(f"stack --missing {PREFIX}" if open_barrier else "stack", self.run_id)
        self._note("late", f"was not done at its deadline: {late}; next: {stacks}", effects)

    @property
    def _reports_at(self) -> float | None:
        """When the late ranks are named, on the monotonic clock; None: no deadline, or they were named."""
        save = self.save
        if save is None or self._due is None or not save.state.stands or save.late:
            return None
        return max(self._due.at, self._reports_from)

    def _arm(self, now: Instant) -> None:
        """Wake up for the newest deadline."""
        self._probed = False
        if self._reports_at is not None:
            self._timers.arm(self, self._reports_at - PROBE_LEAD)

    def _keep(self, save: Save, effects: Effects) -> None:
        self.save = save
        effects.records.append(SaveRecord(self.run_id, save))

    def _tell(self, save: Save, now: Instant, effects: Effects) -> None:
        effects.deliveries.append(Delivery(audience(self._roster), self._announcement(save, now)))

    def _announcement(self, save: Save, now: Instant) -> SaveAsked:
        why = f"asked for by {report.shown(save.by)}{_because(save.reason)}"
        left = max(0.0, self._due.at - now.monotonic) if self._due is not None else None
        return SaveAsked(save.number, save.since, save.stop, why, not save.state.stands, left)

    def _note(self, what: str, text: str, effects: Effects) -> None:
        assert self.save is not None
        message = f"save {self.save.number} of run {self.run_id} {text}"
        effects.notices.append(Notice(f"save.{what}", self.run_id, message))


def _newest(group: Group) -> Decision | None:
    """Return the last decision; None if there was none, or it is no longer kept."""
    return group.decisions.get(group.next_sequence - 1)


def _because(reason: str) -> str:
    return f": {report.shown(reason)}" if reason else ""
