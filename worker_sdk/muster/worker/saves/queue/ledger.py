"""The saves of a queue: a pure function of events to effects, without threads, clocks or I/O.

The loop thread feeds events in, one after the other, and carries the effects out. A save is opaque here:
any object that stands for it. The tables :data:`QUEUE_MOVES` and :data:`SAVE_MOVES` say every change of
state that can happen.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from muster.worker.errors import MusterError, OutcomeUnknownError
from muster.worker.saves.queue.effects import (
    Answer,
    Await,
    Clean,
    DecidedSave,
    Effect,
    EndWrite,
    Order,
    QueueEnded,
    ReleaseQueue,
    Reopen,
    Reserved,
    RetireGroup,
    View,
    Vote,
)
from muster.worker.saves.queue.events import (
    Abandoned,
    Abort,
    CheckOpen,
    Cleaned,
    Close,
    Decided,
    EndWrites,
    Event,
    Forget,
    GetView,
    OutcomeUnknown,
    Reopened,
    Reserve,
    Take,
    Wait,
    WriteEnded,
    WriteStarted,
)
from muster.worker.saves.queue.states import QUEUE_MOVES, SAVE_MOVES, Asker, QueueState, Save, SaveState


@dataclass(slots=True)
class _Slot:
    save: Save
    idx: int
    thread: int
    state: SaveState = SaveState.RESERVED
    failure: str | None = None
    """Why this rank's part failed."""
    error: MusterError | None = None
    """Why the save must not be finalized."""
    aborted: bool = False

    def move(self, state: SaveState) -> None:
        assert state in SAVE_MOVES[self.state], f"save {self.idx}: {self.state} to {state}"
        self.state = state

    @property
    def decided(self) -> bool:
        return self.state is SaveState.DECIDED


@dataclass(slots=True)
class Ledger:
    """The saves of one queue, oldest first, and the state of the queue."""

    state: QueueState = QueueState.INACTIVE
    _next_idx: int = 0
    _slots: deque[_Slot] = field(default_factory=deque)
    """The saves that are neither finalized nor dropped."""
    _late: dict[Save, str] = field(default_factory=dict)
    """Saves that were given up while their callers still prepared them, and why."""
    _reaping: deque[Save] = field(default_factory=deque)
    """Saves that were given up and whose callers are done since: their writes must be waited for."""
    _cleaning: deque[Save] = field(default_factory=deque)
    """Saves that are decided and not cleaned up after."""
    _busy: bool = False
    """Whether the voter has an order."""
    _unknown: OutcomeUnknownError | None = None
    """Why the oldest save is not decided."""
    _ends_as: QueueState = QueueState.CLOSED
    _aborted_at: int | None = None
    """The number that came next at the last abort."""
    _forgotten: bool = False
    _waiting: list[Wait] = field(default_factory=list)
    _enders: list[Asker] = field(default_factory=list)
    """Callers that wait for the end of a queue that closes."""
    _dropped: list[DecidedSave] = field(default_factory=list)
    """The saves that the abort under way has dropped."""
    _effects: list[Effect] = field(default_factory=list)

    def step(self, event: Event) -> list[Effect]:
        """Take one event in.

        Nothing here depends on time: the threads that wait know how long a write or a vote may take.

        Returns:
            The effects to carry out, in this order.
        """
        _HANDLERS[type(event)](self, event)
        self._proceed()
        self._answer_waiting()
        effects, self._effects = self._effects, []
        return effects

    @property
    def view(self) -> View:
        """How the queue stands."""
        ready = next((n for n, slot in enumerate(self._slots) if not slot.decided), len(self._slots))
        return View(self.state, self._next_idx, ready, len(self._slots))

    @property
    def over(self) -> bool:
        """Whether the queue is closed, and nothing is left to be done for it."""
        return self.state is QueueState.CLOSED and not (self._busy or self._reaping or self._cleaning)

    def saves(self) -> list[tuple[Save, SaveState]]:
        """Return the saves that are neither finalized nor dropped, oldest first."""
        return [(slot.save, slot.state) for slot in self._slots]

    # ------------------------------------------------------------------ what callers ask

    def _reserve(self, event: Reserve) -> None:
        if self.state is QueueState.INACTIVE:
            self._effects.append(Reopen(event))
        elif self.state is not QueueState.OPEN:
            self._effects.append(Answer(event.asker, _closed()))
        else:
            self._give_up_prepared(event.thread, "the thread that began it has begun another save")
            self._slots.append(_Slot(event.save, self._next_idx, event.thread))
            self._effects.append(Reserved(event.save, self._next_idx, event.asker))
            self._next_idx += 1

    def _filled(self, event: WriteStarted) -> None:
        slot = self._slot(event.save)
        if event.save in self._late:
            self._reap(event.save)
        elif slot is not None and slot.state is SaveState.RESERVED:
            slot.move(SaveState.WRITING)

    def _abandoned(self, event: Abandoned) -> None:
        slot = self._slot(event.save)
        if event.save in self._late:
            self._reap(event.save)
        elif slot is not None and slot.state is SaveState.RESERVED:
            slot.move(SaveState.WRITING)
            self._end_write(slot, event.reason)

    def _check_open(self, event: CheckOpen) -> None:
        if self.state is QueueState.INACTIVE:
            self._effects.append(Reopen(event))
        else:
            self._effects.append(Answer(event.asker, None if self.state is QueueState.OPEN else _closed()))

    def _look(self, event: GetView) -> None:
        self._effects.append(Answer(event.asker, self.view))

    def _wait(self, event: Wait) -> None:
        self._waiting.append(event)

    def _take(self, event: Take) -> None:
        taken = None
        if self._slots and self._slots[0].decided:
            slot = self._slots.popleft()
            slot.move(SaveState.FINALIZED)
            taken = DecidedSave(slot.save, slot.error)
        self._effects.append(Answer(event.asker, taken))

    # ------------------------------------------------------------------ ends

    def _end_writes(self, event: EndWrites) -> None:
        for slot in self._slots:
            if slot.state is SaveState.WRITING:
                self._end_write(slot, event.reason)

    def _close(self, event: Close) -> None:
        self._give_up_prepared(event.thread, "its queue was closed while it was begun")
        self._move_to_closed()
        self._await_end(event.asker)

    def _abort(self, event: Abort) -> None:
        if self.state is QueueState.OPEN:
            self._move(QueueState.CLOSING)
            self._ends_as = QueueState.INACTIVE
        if self.state is QueueState.CLOSING:
            self._aborted_at = self._next_idx
        for slot in list(self._slots):
            slot.aborted = True
            if slot.state is SaveState.RESERVED:
                self._give_up(slot, event.reason)
            elif slot.state is SaveState.WRITING:
                self._end_write(slot, event.reason)
            elif slot.decided:
                self._drop(slot)
        self._await_end(event.asker)

    def _forget(self, _: Forget) -> None:
        self._forgotten = True
        self._move_to_closed()

    def _move_to_closed(self) -> None:
        if self.state in (QueueState.OPEN, QueueState.INACTIVE):
            self._move(QueueState.CLOSING if self.state is QueueState.OPEN else QueueState.CLOSED)
        self._ends_as = QueueState.CLOSED

    def _await_end(self, asker: Asker) -> None:
        if self.state is QueueState.CLOSING:
            self._enders.append(asker)
        else:
            self._effects.append(Answer(asker, QueueEnded(self._take_dropped())))

    def _take_dropped(self) -> tuple[DecidedSave, ...]:
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _reopened(self, _: Reopened) -> None:
        self._move(QueueState.OPEN)
        self._unknown = None

    # ------------------------------------------------------------------ what the voter answers

    def _write_ended(self, event: WriteEnded) -> None:
        self._busy = False
        slot = self._slot(event.save)
        if slot is not None and slot.state is SaveState.WRITING:
            slot.failure = slot.failure or event.failure
            slot.move(SaveState.WRITTEN)

    def _decided(self, event: Decided) -> None:
        self._busy = False
        self._unknown = None
        self._decide(self._slots_of(event.save), event.error)

    def _outcome_unknown(self, event: OutcomeUnknown) -> None:
        self._busy = False
        self._unknown = event.error

    def _cleaned(self, _: Cleaned) -> None:
        self._busy = False

    # ------------------------------------------------------------------ the rules

    def _move(self, state: QueueState) -> None:
        assert state in QUEUE_MOVES[self.state], f"{self.state} to {state}"
        self.state = state

    def _slot(self, save: Save) -> _Slot | None:
        return next((slot for slot in self._slots if slot.save is save), None)

    def _slots_of(self, save: Save) -> _Slot:
        slot = self._slot(save)
        assert slot is not None
        return slot

    def _give_up_prepared(self, thread: int, reason: str) -> None:
        """Give up what a thread prepared: it does something else, so an interrupt ended or suspended that."""
        for slot in self._slots:
            if slot.state is SaveState.RESERVED and slot.thread == thread:
                self._give_up(slot, reason)

    def _give_up(self, slot: _Slot, reason: str) -> None:
        """Vote on a save now, though its caller may still start a write, which is killed then."""
        slot.failure = reason
        slot.move(SaveState.WRITTEN)
        self._late[slot.save] = reason

    def _end_write(self, slot: _Slot, reason: str) -> None:
        """Count a write as failed, even if it has ended well in the meantime, and kill its writer."""
        slot.failure = slot.failure or reason
        self._effects.append(EndWrite(slot.save, reason))

    def _reap(self, save: Save) -> None:
        self._effects.append(EndWrite(save, self._late.pop(save)))
        self._reaping.append(save)

    def _decide(self, slot: _Slot, error: MusterError | None) -> None:
        slot.error = error
        slot.move(SaveState.DECIDED)
        self._cleaning.append(slot.save)
        if slot.aborted:
            self._drop(slot)

    def _drop(self, slot: _Slot) -> None:
        slot.move(SaveState.DROPPED)
        self._slots.remove(slot)
        self._dropped.append(DecidedSave(slot.save, slot.error))

    def _proceed(self) -> None:
        """Give the voter its next order, if it has none; end a queue that closes and has nothing left."""
        while not self._busy:
            slot = next((slot for slot in self._slots if not slot.decided), None)
            if self._reaping:
                self._order(Await(self._reaping.popleft()))
            elif self._cleaning:
                self._order(Clean(self._cleaning.popleft()))
            elif slot is None:
                self._end()
                return
            elif slot.state is SaveState.RESERVED:
                return
            elif slot.state is SaveState.WRITING:
                self._order(Await(slot.save))
            elif self._unknown is None or self.state is QueueState.OPEN:
                # A vote without an answer is repeated: the coordinator knows the outcome, or will.
                self._order(Vote(slot.save, slot.failure, self._since_abort(slot)))
            else:
                # A later save cannot be decided either: its barrier is the group's next one.
                self._effects.append(RetireGroup(slot.save))
                self._decide(slot, self._unknown)

    def _order(self, order: Order) -> None:
        self._busy = True
        self._effects.append(order)

    def _since_abort(self, slot: _Slot) -> int | None:
        if self._aborted_at is None or slot.idx < self._aborted_at:
            return None
        return slot.idx - self._aborted_at

    def _end(self) -> None:
        if self.state is QueueState.CLOSING:
            self._move(self._ends_as)
            enders, self._enders = tuple(self._enders), []
            self._effects.append(ReleaseQueue(enders, self._take_dropped(), self._forgotten))

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for wait in waiting:
            undecided = [slot for slot in self._slots if not slot.decided]
            if all(slot.state is SaveState.RESERVED and slot.thread == wait.thread for slot in undecided):
                self._effects.append(Answer(wait.asker, self.view.ready))
            elif self._unknown is not None and self.state is QueueState.OPEN:
                self._effects.append(Answer(wait.asker, self._unknown))
            else:
                self._waiting.append(wait)


def _closed() -> MusterError:
    return MusterError("this queue of saves is closed; make another one.")


_HANDLERS: Mapping[type[Any], Callable[[Ledger, Any], None]] = {
    Reserve: Ledger._reserve,
    WriteStarted: Ledger._filled,
    Abandoned: Ledger._abandoned,
    CheckOpen: Ledger._check_open,
    GetView: Ledger._look,
    Wait: Ledger._wait,
    Take: Ledger._take,
    EndWrites: Ledger._end_writes,
    Close: Ledger._close,
    Abort: Ledger._abort,
    Forget: Ledger._forget,
    Reopened: Ledger._reopened,
    WriteEnded: Ledger._write_ended,
    Decided: Ledger._decided,
    OutcomeUnknown: Ledger._outcome_unknown,
    Cleaned: Ledger._cleaned,
}
