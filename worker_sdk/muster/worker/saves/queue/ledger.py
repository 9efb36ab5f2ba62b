"""The state of a queue of saves: a pure function of events to effects, without threads, clocks or I/O.

The loop thread feeds events in, one after the other, and carries the effects out. A save is opaque here:
any object that stands for it. The tables :data:`QUEUE_MOVES` and :data:`SAVE_MOVES` say every change of
state that can happen.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from threading import Thread
from typing import Any, TypeAlias

from muster.worker.errors import MusterError, OutcomeUnknownError

Save: TypeAlias = Any
"""Stands for one save."""
Asker: TypeAlias = Any
"""Stands for a caller that waits for an answer."""


class QueueState(Enum):
    """What a queue does with a new save."""

    OPEN = "open"
    """Takes it."""
    CLOSING = "closing"
    """Refuses it; earlier saves are not decided yet."""
    CLOSED = "closed"
    """Refuses it, for good."""
    ABORTED = "aborted"
    """Opens again for it. A new queue begins like this, too."""


class SaveState(Enum):
    """How far a save has come on this rank."""

    RESERVED = "reserved"
    """It has its number; its caller still prepares it."""
    WRITING = "writing"
    """Its caller has handed it over; its write, if there is one, has not ended."""
    WRITTEN = "written"
    """Its write has ended, well or not. The ranks vote."""
    DECIDED = "decided"
    """Its outcome is known, or given up as unknown."""
    FINALIZED = "finalized"
    """A caller has taken it, to finalize it or to raise its error."""
    DROPPED = "dropped"
    """An abort has taken it: it is never finalized."""


QUEUE_MOVES: Mapping[QueueState, frozenset[QueueState]] = {
    QueueState.OPEN: frozenset({QueueState.CLOSING}),
    QueueState.CLOSING: frozenset({QueueState.CLOSED, QueueState.ABORTED}),
    QueueState.ABORTED: frozenset({QueueState.OPEN, QueueState.CLOSED}),
    QueueState.CLOSED: frozenset(),
}
SAVE_MOVES: Mapping[SaveState, frozenset[SaveState]] = {
    SaveState.RESERVED: frozenset({SaveState.WRITING, SaveState.WRITTEN}),
    SaveState.WRITING: frozenset({SaveState.WRITTEN}),
    SaveState.WRITTEN: frozenset({SaveState.DECIDED}),
    SaveState.DECIDED: frozenset({SaveState.FINALIZED, SaveState.DROPPED}),
    SaveState.FINALIZED: frozenset(),
    SaveState.DROPPED: frozenset(),
}

# ---------------------------------------------------------------------- events: from callers


@dataclass(frozen=True, slots=True)
class Reserve:
    """A caller begins a save."""

    save: Save
    thread: int
    """The caller's. A thread that begins a save no longer prepares an earlier one."""
    asker: Asker


@dataclass(frozen=True, slots=True)
class Filled:
    """The caller has started the save's write, or the save has no write."""

    save: Save


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The caller cannot go on with the save. It says so, or its frame is gone.

    It is stale, and changes nothing, once the save is filled or if it was never reserved.
    """

    save: Save
    reason: str


@dataclass(frozen=True, slots=True)
class CheckOpen:
    """Does the queue take saves? An aborted one opens again."""

    asker: Asker


@dataclass(frozen=True, slots=True)
class Look:
    """How does the queue stand?"""

    asker: Asker


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until every save is decided, except one that this thread itself prepares."""

    thread: int
    asker: Asker


@dataclass(frozen=True, slots=True)
class Take:
    """Take the oldest save, if it is decided."""

    asker: Asker


@dataclass(frozen=True, slots=True)
class EndWrites:
    """End every write that is under way."""

    reason: str


@dataclass(frozen=True, slots=True)
class Close:
    """Take no further saves, and end when all are decided."""

    thread: int
    """The caller's, which no longer prepares a save."""
    asker: Asker
    """Waits for the end."""


@dataclass(frozen=True, slots=True)
class Abort:
    """End every write, finalize nothing, and open again for the next save unless the queue was closed."""

    reason: str
    asker: Asker
    """Waits for the end."""


@dataclass(frozen=True, slots=True)
class Forget:
    """Nobody holds the queue any more."""


# ---------------------------------------------------------------------- events: from the two threads


@dataclass(frozen=True, slots=True)
class Reopened:
    """The queue has its group."""


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """The answer to :class:`Await`."""

    save: Save
    failure: str | None


@dataclass(frozen=True, slots=True)
class Decided:
    """An answer to :class:`Vote`."""

    save: Save
    error: MusterError | None
    """None: every rank has written, and the commit succeeded on every rank."""


@dataclass(frozen=True, slots=True)
class OutcomeUnknown:
    """The other answer to :class:`Vote`: the coordinator was away for as long as a save may take."""

    save: Save
    error: OutcomeUnknownError


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The answer to :class:`Clean`."""

    save: Save


Question: TypeAlias = Reserve | CheckOpen | Look | Wait | Take | Abort
Event: TypeAlias = (
    Question
    | Filled
    | Abandoned
    | EndWrites
    | Close
    | Forget
    | Reopened
    | WriteEnded
    | Decided
    | OutcomeUnknown
    | Cleaned
)

# ---------------------------------------------------------------------- answers


@dataclass(frozen=True, slots=True)
class View:
    """How a queue stands."""

    state: QueueState
    next_idx: int
    """The number of the next save."""
    ready: int
    """How many saves, from the oldest on, are decided."""
    unfinalized: int
    """How many are neither finalized nor dropped."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A save that is decided."""

    save: Save
    error: MusterError | None
    """Why it must not be finalized."""


@dataclass(frozen=True, slots=True)
class Over:
    """A queue has ended."""

    dropped: tuple[Outcome, ...]
    """The saves that an abort has dropped, oldest first."""
    error: BaseException | None = None
    """Why the writers could not be released."""
    thread: Thread | None = None
    """The thread that has closed the queue, and is about to end."""


# ---------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Answer:
    """Give a caller its answer. An exception is raised there."""

    asker: Asker
    value: object


@dataclass(frozen=True, slots=True)
class Reserved:
    """Tell a save and its caller the save's number."""

    save: Save
    idx: int
    asker: Asker


@dataclass(frozen=True, slots=True)
class Reopen:
    """Take the group, then hand in :class:`Reopened` and the question again; or refuse the question."""

    question: Reserve | CheckOpen


@dataclass(frozen=True, slots=True)
class EndWrite:
    """Kill a save's writer, if it has one."""

    save: Save
    reason: str


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for the end of a save's write; then its memory may be used again."""

    save: Save


@dataclass(frozen=True, slots=True)
class Vote:
    """Vote on a save, and on its commit if every rank has written."""

    save: Save
    failure: str | None
    """Why this rank's write failed."""
    since_abort: int | None
    """How many saves came before it since the last abort; None before any."""


@dataclass(frozen=True, slots=True)
class Clean:
    """Clean up after a save that is decided."""

    save: Save


@dataclass(frozen=True, slots=True)
class Doubt:
    """The group may never take another save: this rank gives up a save whose outcome it does not know."""

    save: Save


@dataclass(frozen=True, slots=True)
class Shut:
    """Release the writers and the group, and tell the callers that wait for it."""

    askers: tuple[Asker, ...]
    dropped: tuple[Outcome, ...]
    """The saves that an abort has dropped, oldest first."""
    forgotten: bool
    """Whether nobody holds the queue. Then wait for nothing."""


Order: TypeAlias = Await | Vote | Clean
"""An order to the voter, which has one at a time, and answers each by one event."""
Effect: TypeAlias = Answer | Reserved | Reopen | EndWrite | Doubt | Shut | Order

# ---------------------------------------------------------------------- the ledger


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

    state: QueueState = QueueState.ABORTED
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
    _dropped: list[Outcome] = field(default_factory=list)
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
        if self.state is QueueState.ABORTED:
            self._effects.append(Reopen(event))
        elif self.state is not QueueState.OPEN:
            self._effects.append(Answer(event.asker, _closed()))
        else:
            self._leave(event.thread, "the thread that began it has begun another save")
            self._slots.append(_Slot(event.save, self._next_idx, event.thread))
            self._effects.append(Reserved(event.save, self._next_idx, event.asker))
            self._next_idx += 1

    def _filled(self, event: Filled) -> None:
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
        if self.state is QueueState.ABORTED:
            self._effects.append(Reopen(event))
        else:
            self._effects.append(Answer(event.asker, None if self.state is QueueState.OPEN else _closed()))

    def _look(self, event: Look) -> None:
        self._effects.append(Answer(event.asker, self.view))

    def _wait(self, event: Wait) -> None:
        self._waiting.append(event)

    def _take(self, event: Take) -> None:
        taken = None
        if self._slots and self._slots[0].decided:
            slot = self._slots.popleft()
            slot.move(SaveState.FINALIZED)
            taken = Outcome(slot.save, slot.error)
        self._effects.append(Answer(event.asker, taken))

    # ------------------------------------------------------------------ ends

    def _end_writes(self, event: EndWrites) -> None:
        for slot in self._slots:
            if slot.state is SaveState.WRITING:
                self._end_write(slot, event.reason)

    def _close(self, event: Close) -> None:
        self._leave(event.thread, "its queue was closed while it was begun")
        self._move_to_closed()
        self._await_end(event.asker)

    def _abort(self, event: Abort) -> None:
        if self.state is QueueState.OPEN:
            self._move(QueueState.CLOSING)
            self._ends_as = QueueState.ABORTED
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
        if self.state in (QueueState.OPEN, QueueState.ABORTED):
            self._move(QueueState.CLOSING if self.state is QueueState.OPEN else QueueState.CLOSED)
        self._ends_as = QueueState.CLOSED

    def _await_end(self, asker: Asker) -> None:
        if self.state is QueueState.CLOSING:
            self._enders.append(asker)
        else:
            self._effects.append(Answer(asker, Over(self._take_dropped())))

    def _take_dropped(self) -> tuple[Outcome, ...]:
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

    def _leave(self, thread: int, reason: str) -> None:
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
        self._dropped.append(Outcome(slot.save, slot.error))

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
                self._effects.append(Doubt(slot.save))
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
            self._effects.append(Shut(enders, self._take_dropped(), self._forgotten))

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
    Filled: Ledger._filled,
    Abandoned: Ledger._abandoned,
    CheckOpen: Ledger._check_open,
    Look: Ledger._look,
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
