"""The requested save of a run: all ranks save at one step, or none does.

The ranks agree on the step at a barrier of the group ``PREFIX``, where each rank hands in the last step that
it may reach. They confirm the save at the next barrier of that group. So the rules of barriers cover failures
of ranks. This module keeps the request, and reads from each release what became of it.
"""

from dataclasses import replace

from muster.service.core.barriers.barrier import OpenBarrier
from muster.service.core.barriers.group import Group
from muster.service.core.barriers.observations import PROBE_LEAD
from muster.service.core.barriers.refusals import cut
from muster.service.core.elapsed import RECONNECT_GRACE
from muster.service.core.membership.process import audience
from muster.service.core.membership.roster import Roster
from muster.service.core.saves.late_ranks import late_ranks, probe_targets
from muster.service.core.saves.notices import moved, request_of, with_notice, without_request
from muster.service.core.saves.votes import Phase, SaveVote, parse_vote, released_votes
from muster.service.core.timers import WakeUps
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import Delivery, Effects, Notice, ProbeRequest, SaveAsked
from muster.service.core.vocabulary.events import RequestSave
from muster.service.core.vocabulary.model import Decision, Instant, MissingRank, Save, SaveState
from muster.service.core.vocabulary.records import SaveRecord
from muster.service.core.vocabulary.refusal import Reason, Refusal

PREFIX = "muster/save"
"""The group of the barriers at which ranks agree on a save and confirm it."""
MIN_SHORTENING = 1.0
"""Seconds by which a deadline must be earlier to count: ranks that get one signal differ by less."""
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
        self._probed = 0
        """The number of the last request before whose deadline ranks were probed."""
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
        self._reports_from = now.monotonic + RECONNECT_GRACE
        self._arm(now)

    def asked(self, now: Instant) -> SaveAsked | None:
        """Return the message for a process that connects. If it is over, later ones are told apart by it."""
        return None if self.save is None else _announcement(self.save, now)

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
        deadline = now.wall + ask.deadline if ask.deadline is not None else None
        if last is not None and self._covers(last, ask, generation):
            self._extend(last, ask, deadline, now, effects)
            return True
        pending = last if last is not None and last.state.stands else None
        number = last.number + 1 if last is not None else 1
        stop, across, covers_plain = ask.stop, ask.across_generations, False
        notices = last.notices if last is not None else ()
        if pending is not None:
            covers_plain = pending.covers_plain or not pending.stop
            if pending.lapses_before(generation):
                notices = without_request(notices, pending.number)
            else:
                stop, across = stop or pending.stop, across or pending.across_generations
                notices = moved(notices, pending.number, number)
                deadline = _earlier(deadline, pending.deadline)
        asked = Save(
            number,
            SaveState.ASKED,
            stop,
            ask.by,
            ask.reason,
            now.wall,
            self._next_sequence,
            generation=generation,
            across_generations=across,
            covers_plain=stop and (covers_plain or not ask.stop),
            deadline=deadline,
            notices=with_notice(notices, ask.notice, number),
        )
        self._keep(asked, effects)
        self._tell(asked, now, effects)
        self._arm(now)
        ending = ", and training is to end" if stop else ""
        text = f"was asked for by {report.shown(ask.by)}{ending}{_because(ask.reason)}"
        self._note("asked", text, effects)
        return False

    def _covers(self, last: Save, ask: RequestSave, generation: int) -> bool:
        """Whether an earlier request covers another one."""
        outdated = last.lapses_before(generation)
        failed = last.state.stands and (outdated or self._failed(last))
        if ask.notice and (number := request_of(last.notices, ask.notice)) is not None:
            # Whatever became of that request: the notice was heeded once.
            return number < last.number or not failed
        if last.stop < ask.stop or outdated:
            return False
        if last.state.stands and not failed:
            return True
        unheard = ask.known is not None and last.number > ask.known
        return unheard and last.generation == generation and last.state is not SaveState.LAPSED

    def _extend(
        self, last: Save, ask: RequestSave, deadline: float | None, now: Instant, effects: Effects
    ) -> None:
        """Add to the newest request what a request that it covers asks for beyond it."""
        extended = last
        if request_of(last.notices, ask.notice) is None:
            extended = replace(last, notices=with_notice(last.notices, ask.notice, last.number))
        if last.state.stands:
            extended = replace(
                extended,
                across_generations=last.across_generations or ask.across_generations,
                covers_plain=last.covers_plain or (last.stop and not ask.stop),
                deadline=deadline if _is_earlier(deadline, last.deadline) else last.deadline,
            )
        if extended != last:
            self._keep(extended, effects)
        if extended.deadline != last.deadline:
            self._tell(extended, now, effects)
            self._arm(now)

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
            lapsed = replace(self.save, state=SaveState.LAPSED, ended_at=now.wall)
            left = without_request(lapsed.notices, lapsed.number)
            self._keep(replace(lapsed, notices=left), effects)
            self._note("lapsed", f"lapsed, because generation {lapsed.generation} is over", effects)
            if lapsed.covers_plain:
                plain = replace(
                    self.save,
                    number=lapsed.number + 1,
                    stop=False,
                    covers_plain=False,
                    deadline=None,
                    late="",
                )
                self._ask_again(replace(plain, asked_at=now.wall, ended_at=None), effects)
        else:
            self._ask_again(self.save, effects)

    def _ask_again(self, save: Save, effects: Effects) -> None:
        """Ask the processes of a newer generation, or of the job that starts again, for a save."""
        self._keep(replace(save, state=SaveState.ASKED, step=None, since=self._next_sequence), effects)

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
        save = self.save
        if save is None or save.deadline is None or not save.state.stands or save.late:
            return
        due = self._due(save.deadline, now)
        group = self._groups.get(PREFIX)
        if now.monotonic >= due:
            self._report_late(save, late_ranks(group, self._roster, now.monotonic), now, effects)
            return
        if now.monotonic >= due - PROBE_LEAD and self._probed < save.number:
            self._probed = save.number
            targets = probe_targets(group, self._roster)
            effects.probes.append(ProbeRequest(self.run_id, targets, due - now.monotonic))
        self._arm(now)

    def _report_late(self, save: Save, ranks: list[MissingRank], now: Instant, effects: Effects) -> None:
        late = report.late_save(ranks, agreed=save.state is SaveState.AGREED)
        self._keep(replace(save, late=cut(late, MAX_LATE_BYTES)), effects)
        self._note("late", f"was not done at its deadline: {late}", effects)

    def _due(self, deadline: float, now: Instant) -> float:
        """Return when ranks are named as late, on the monotonic clock."""
        return max(now.monotonic + deadline - now.wall, self._reports_from)

    def _arm(self, now: Instant) -> None:
        save = self.save
        if save is None or save.deadline is None or not save.state.stands or save.late:
            return
        due = self._due(save.deadline, now)
        self._timers.arm(self, due if self._probed >= save.number else due - PROBE_LEAD)

    def _keep(self, save: Save, effects: Effects) -> None:
        self.save = save
        effects.records.append(SaveRecord(self.run_id, save))

    def _tell(self, save: Save, now: Instant, effects: Effects) -> None:
        effects.deliveries.append(Delivery(audience(self._roster), _announcement(save, now)))

    def _note(self, what: str, text: str, effects: Effects) -> None:
        assert self.save is not None
        message = f"save {self.save.number} of run {self.run_id} {text}"
        effects.notices.append(Notice(f"save.{what}", self.run_id, message))


def _newest(group: Group) -> Decision | None:
    """Return the last decision; None if there was none, or it is no longer kept."""
    return group.decisions.get(group.next_sequence - 1)


def _announcement(save: Save, now: Instant) -> SaveAsked:
    withdrawn = not save.state.stands
    why = f"asked for by {report.shown(save.by)}{_because(save.reason)}"
    left = max(0.0, save.deadline - now.wall) if save.deadline is not None else None
    return SaveAsked(save.number, save.since, save.stop, why, withdrawn, left)


def _earlier(one: float | None, other: float | None) -> float | None:
    """Return the earlier of two deadlines; None: none of them is set."""
    return min((at for at in (one, other) if at is not None), default=None)


def _is_earlier(deadline: float | None, than: float | None) -> bool:
    """Whether a deadline is so much earlier that the ranks must be told again."""
    return deadline is not None and (than is None or deadline <= than - MIN_SHORTENING)


def _because(reason: str) -> str:
    return f": {report.shown(reason)}" if reason else ""
