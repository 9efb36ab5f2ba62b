"""The thread that owns the state of a queue of saves.

Callers hand events to it by one ``SimpleQueue.put``, which no signal can interrupt half-way and which a
finalizer may call at any place. The thread that signals interrupt therefore owns nothing that an interrupt
could leave half changed.

The loop of an open queue waits for nothing but the next event. It does not log, import, or take a lock:
the caller that waits for an answer may be a signal handler. That has interrupted its thread anywhere, and
holds the locks that this thread held there.
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from muster.worker.saves.queue.calls import Call
from muster.worker.saves.queue.effects import (
    Answer,
    Await,
    Clean,
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
from muster.worker.saves.queue.events import Event, Reopened
from muster.worker.saves.queue.groups import Group
from muster.worker.saves.queue.ledger import Ledger
from muster.worker.saves.queue.states import Asker, QueueState
from muster.worker.saves.queue.voter import Voter
from muster.worker.saves.writers.callers import AsyncCaller

logger = logging.getLogger("muster.worker.saves.queue")  # As users know it.

LOOP = "muster-saves-loop"
VOTER = "muster-saves"


class QueueLoop:
    """Owns the state of one queue, and carries out what follows from each event.

    Its thread and the voter's run until the queue is closed or collected, also while it is aborted. Once the
    queue is closed, a thread runs for as long as there are further events. The threads hold this object but
    not the queue, so a queue that nobody holds is collected.

    Args:
        group: decides by which barriers the queue votes.
        caller: starts the writes.
        voter: waits and votes.
    """

    def __init__(self, group: Group, caller: AsyncCaller, voter: Voter) -> None:
        self.voter = voter
        self.ledger = Ledger()
        """Changed by the loop's thread only."""
        self.view: View = self.ledger.view
        """How the queue stood after the last event."""
        self._inbox: SimpleQueue[tuple[Event, bool]] = SimpleQueue()
        """The events, in order, and whether there is a mark for each."""
        self._marks: deque[None] = deque()
        """One for each event that was posted and is not taken in. If an interrupt leaves a mark behind, later
        callers ask the thread; it does no other harm."""
        self.watched: weakref.ref[Any] | None = None
        """The queue. Its callback posts an event when nobody holds the queue any more."""
        self._serving = threading.Lock()
        """Held by the thread that serves."""
        self._group = group
        self._held: list[Group] = []
        """The group, while the queue has it. The thread that pops it gives it back."""
        self._caller = caller
        self._keeping: threading.Thread | None = None
        self._voting: threading.Thread | None = None
        self._unfit: RuntimeError | None = None
        self._answers: list[tuple[Asker, object]] = []
        """The answers to the event that is being taken in."""
        self._farewells: list[tuple[Asker, QueueEnded]] = []

    def put(self, event: Event) -> None:
        """Hand in an event. A closed queue takes it in later."""
        self._inbox.put((event, False))

    def putter(self, event: Event) -> Callable[..., None]:
        """Return a function that hands in an event without running a bytecode, wherever it is called."""
        return partial(self._inbox.put, (event, False))

    def post(self, event: Event) -> None:
        """Hand in an event, and have it taken in now, even if the queue is closed."""
        self._marks.append(None)
        self._inbox.put((event, True))
        self._ensure_served()

    def settled(self) -> bool:
        """Return whether :attr:`view` shows every event that was posted."""
        return not self._marks

    def drop_group(self) -> None:
        """Let another queue have the group at once, when nobody holds this queue any more."""
        self._return_group(forgotten=True)

    def runs_here(self) -> bool:
        """Return whether this is one of the queue's own threads."""
        return threading.current_thread() in (self._voting, self._keeping)

    # ------------------------------------------------------------------ the thread

    def _ensure_served(self) -> None:
        # A thread that ends looks for events once more when it does not serve any longer.
        if not self._serving.locked():
            try:
                threading.Thread(target=self._serve, name=LOOP, daemon=True).start()
            except RuntimeError as error:
                # There is no room for a thread, or Python is ending. A queue that is closed still answers.
                self._serve(unfit=error)

    def _serve(self, unfit: RuntimeError | None = None) -> None:
        """Take in events until the queue is closed.

        Args:
            unfit: why no thread could be started. Then the caller's thread takes in the events that are
                there, and the queue does not open.
        """
        if not self._serving.acquire(blocking=False):
            return  # Another thread was faster.
        self._unfit = unfit
        self._keeping = threading.current_thread()
        # Callers that wait for the end join this thread, so it must end even if there are further events.
        while not self._farewells and not (self._inbox.empty() and (self.ledger.over or unfit)):
            self._take_in()
        if self._voting is not None:
            self.voter.orders.put(None)
            self._voting.join()
            self._voting = None
        farewells, self._farewells = self._farewells, []
        ending = self._keeping if unfit is None else None
        self._keeping = None
        self._serving.release()
        for asker, over in farewells:
            asker.put(replace(over, thread=ending))
        if not self._inbox.empty():
            self._ensure_served()

    def _take_in(self) -> None:
        """Take in the next event. Its caller gets the answer only when the view shows the event."""
        event, marked = self._inbox.get()
        self._apply(event)
        if marked:
            self._marks.popleft()
        answers, self._answers = self._answers, []
        for asker, value in answers:
            asker.put(value)

    def _apply(self, event: Event) -> None:
        try:
            effects = self.ledger.step(event)
        except BaseException as error:  # A defect. The caller must hear of it rather than wait for ever.
            logger.exception("the state of a queue of saves is broken")
            if (asker := getattr(event, "asker", None)) is not None:
                self._answer(asker, error)
            return
        self.view = self.ledger.view
        for effect in effects:
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Answer(asker, QueueEnded() as over):
                self._say_over(asker, over)
            case Answer():
                self._answer(effect.asker, effect.value)
            case Reserved():
                effect.save.number(effect.idx)
                self._answer(effect.asker, effect.idx)
            case Reopen():
                self._reopen(effect)
            case EndWrite():
                self._end_write(effect.save, effect.reason)
            case RetireGroup():
                self._group.retire(effect.save.name)
            case ReleaseQueue():
                self._shut(effect)
            case Await() | Vote() | Clean():
                self._order(effect)

    def _reopen(self, effect: Reopen) -> None:
        try:
            if self._unfit is not None:
                raise self._unfit
            self._group.take()
            self._held.append(self._group)
            self._ensure_voter()  # A thread that begins beside a fork may harm the child.
        except BaseException as error:
            self._return_group(forgotten=False)
            self._answer(effect.question.asker, error)
            return
        self._apply(Reopened())
        self._apply(effect.question)

    def _end_write(self, call: Call, reason: str) -> None:
        if call.write is not None:
            try:
                call.write.abort(reason)
            except BaseException:
                logger.exception("%s: its write cannot be ended", call.name)

    def _order(self, order: Order) -> None:
        try:
            self._ensure_voter()
        except RuntimeError as error:  # The queue is closed, and a write that came too late must be reaped.
            logger.warning("no thread can be started to wait for the end of a write: %s", error)
            self.put(self.voter.carry_out(order))
        else:
            self.voter.orders.put(order)

    def _ensure_voter(self) -> None:
        if self._voting is None:
            thread = threading.Thread(target=self.voter.serve, args=(self.put,), name=VOTER, daemon=True)
            thread.start()
            self._voting = thread

    def _shut(self, effect: ReleaseQueue) -> None:
        error: BaseException | None = None
        if not effect.forgotten:  # Else the writers' own finalizers end them.
            try:
                self._caller.close()
            except BaseException as failed:
                error = failed
        self._return_group(forgotten=effect.forgotten)
        over = QueueEnded(effect.dropped, error)
        for asker in effect.askers:
            self._say_over(asker, over)
            over = QueueEnded(())

    def _say_over(self, asker: Asker, over: QueueEnded) -> None:
        if self.ledger.state is QueueState.CLOSED:
            self._farewells.append((asker, over))  # When the threads have ended, too.
        else:
            self._answer(asker, over)

    def _answer(self, asker: Asker, value: object) -> None:
        self._answers.append((asker, value))

    def _return_group(self, *, forgotten: bool) -> None:
        try:
            held = self._held.pop()
        except IndexError:
            return  # It was given back already, or never taken.
        if forgotten:
            held.drop()
        else:
            held.give_back()
