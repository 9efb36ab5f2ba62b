"""The requested save of a run: all ranks save at one step, or none does.

The ranks agree on the step at a barrier of the group ``PREFIX``, where each rank hands in the last step that
it may reach. They confirm the save at the next barrier of that group. So the rules of barriers cover failures
of ranks. This module keeps the request, and reads from each release what became of it.
"""

import enum
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from muster.service.core.barriers.barrier import OpenBarrier
from muster.service.core.barriers.group import Group
from muster.service.core.membership.process import Process, audience
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import Delivery, Effects, Notice, SaveAsked, SaveRecord
from muster.service.core.vocabulary.events import RequestSave
from muster.service.core.vocabulary.model import Decision, Instant, Outcome, Save, SaveState
from muster.service.core.vocabulary.refusal import Reason, Refusal

PREFIX = "muster/save"
"""The group of the barriers at which ranks agree on a save and confirm it."""
MAX_INT64 = 2**63 - 1
"""The largest step, and the largest number of a request."""


class Phase(enum.StrEnum):
    """The purpose of a barrier of the group."""

    AGREE = "agree"
    DONE = "done"


class SaveVote(NamedTuple):
    """The payload of one rank: ``PHASE STEP NUMBER STOP``, in ASCII."""

    phase: Phase
    step: int
    """The last step that it may reach, or the step at which it saved."""
    number: int
    """The number of the newest request that it has heard."""
    stop: bool
    """Whether training ends after the save."""


class Saving:
    """The requested save of one run.

    Args:
        run_id: the run.
        groups: the run's groups, by prefix.
        roster: its processes.
    """

    def __init__(self, run_id: str, groups: dict[str, Group], roster: Iterable[Process]) -> None:
        self.save: Save | None = None
        """The newest request."""
        self._run_id = run_id
        self._groups = groups
        self._roster = roster
        self._seen: int | None = None
        """The group's next sequence when this object last read its newest decision."""

    def restore(self, record: SaveRecord) -> None:
        """Restore the request, after the group, whose decisions were applied before the restart."""
        self.save = record.save
        self._seen = self._next_sequence

    @property
    def asked(self) -> SaveAsked | None:
        """The message for a process that connects. If it is over, later ones are told apart by it."""
        return None if self.save is None else _announcement(self.save)

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
        if last is not None and self._covers(last, ask, generation):
            if ask.across_generations and last.state.stands:
                self._keep(replace(last, across_generations=True), effects)
            return True
        replaced = last is not None and last.state.stands and not last.lapses_before(generation)
        stop = ask.stop or (replaced and last is not None and last.stop)
        number = last.number + 1 if last is not None else 1
        asked = Save(
            number,
            SaveState.ASKED,
            stop,
            ask.by,
            ask.reason,
            now.wall,
            self._next_sequence,
            generation=generation,
            across_generations=ask.across_generations,
        )
        self._keep(asked, effects)
        self._tell(asked, effects)
        ending = ", and training is to end" if stop else ""
        text = f"was asked for by {report.shown(ask.by)}{ending}{_because(ask.reason)}"
        self._note("asked", text, effects)
        return False

    def _covers(self, last: Save, ask: RequestSave, generation: int) -> bool:
        """Whether the newest request covers another one."""
        if last.stop < ask.stop or last.lapses_before(generation):
            return False
        if last.state.stands and not self._failed(last):
            return True
        unheard = ask.known is not None and last.number > ask.known
        return unheard and last.generation == generation and last.state is not SaveState.LAPSED

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
                f"no save of run {self._run_id} is asked for, so none was withdrawn. "
                f"Look at it with: {report.command('describe run', self._run_id)}",
            )
        withdrawn = replace(last, state=SaveState.WITHDRAWN, ended_at=now.wall)
        self._keep(withdrawn, effects)
        self._tell(withdrawn, effects)
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
            votes = _released(_newest(group))
            if votes and self.save is not None and max(vote.number for vote in votes) >= self.save.number:
                self._apply_release(self.save, votes, now, effects)
                if votes[0].phase is Phase.DONE and any(vote.stop for vote in votes):
                    return self.save
        return None

    def _is_of_use(self, barrier: OpenBarrier) -> bool:
        """Whether a request is pending, or the ranks confirm a save that they agreed on."""
        if self.save is not None and self.save.state.stands:
            return True
        vote = next((_parse_vote(payload) for payload in barrier.payloads.values()), None)
        return vote is not None and vote.phase is Phase.DONE

    def _apply_release(self, save: Save, votes: list[SaveVote], now: Instant, effects: Effects) -> None:
        step = max(vote.step for vote in votes)
        if votes[0].phase is Phase.DONE:
            self._keep(replace(save, state=SaveState.DONE, step=step, ended_at=now.wall), effects)
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
            self._keep(replace(self.save, state=SaveState.LAPSED, ended_at=now.wall), effects)
            self._note("lapsed", f"lapsed, because generation {self.save.generation} is over", effects)
        else:
            pending = replace(self.save, state=SaveState.ASKED, step=None, since=self._next_sequence)
            self._keep(pending, effects)

    @property
    def _next_sequence(self) -> int:
        group = self._groups.get(PREFIX)
        return group.next_sequence if group is not None else 0

    def _failed(self, save: Save) -> bool:
        """Whether the ranks tried to agree on this request and failed."""
        group = self._groups.get(PREFIX)
        last = _newest(group) if group is not None else None
        return last is not None and last.sequence >= save.since and not _released(last)

    def _keep(self, save: Save, effects: Effects) -> None:
        self.save = save
        effects.records.append(SaveRecord(self._run_id, save))

    def _tell(self, save: Save, effects: Effects) -> None:
        effects.deliveries.append(Delivery(audience(self._roster), _announcement(save)))

    def _note(self, what: str, text: str, effects: Effects) -> None:
        assert self.save is not None
        message = f"save {self.save.number} of run {self._run_id} {text}"
        effects.notices.append(Notice(f"save.{what}", self._run_id, message))


def _newest(group: Group) -> Decision | None:
    """Return the last decision; None if there was none, or it is no longer kept."""
    return group.decisions.get(group.next_sequence - 1)


def _released(decision: Decision | None) -> list[SaveVote]:
    """Return the votes of all ranks; empty if the barrier failed or the votes differ."""
    if decision is None or decision.outcome is not Outcome.RELEASED:
        return []
    votes = [vote for _, payload in decision.payloads if (vote := _parse_vote(payload)) is not None]
    whole = len(votes) == decision.required and len({vote.phase for vote in votes}) == 1
    if not whole or (votes[0].phase is Phase.DONE and len({vote.step for vote in votes}) > 1):
        return []
    return votes


def _parse_vote(payload: bytes) -> SaveVote | None:
    """Return a rank's vote; None if the payload is malformed."""
    try:
        phase, step, number, stop = payload.decode("ascii").split(" ")
        vote = SaveVote(Phase(phase), int(step), int(number), bool(int(stop)))
    except ValueError:
        return None
    return vote if 0 <= vote.step <= MAX_INT64 and 0 <= vote.number <= MAX_INT64 else None


def _announcement(save: Save) -> SaveAsked:
    withdrawn = not save.state.stands
    why = f"asked for by {report.shown(save.by)}{_because(save.reason)}"
    return SaveAsked(save.number, save.since, save.stop, why, withdrawn)


def _because(reason: str) -> str:
    return f": {report.shown(reason)}" if reason else ""
