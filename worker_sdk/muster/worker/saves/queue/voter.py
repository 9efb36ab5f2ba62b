"""The thread that waits: for the end of a write, in the barriers, and for the functions that a save calls.

The loop gives it one order at a time. It answers each by one event.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from queue import SimpleQueue

from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import MusterError, OutcomeUnknownError
from muster.worker.groups.pending import EarlyWarning
from muster.worker.saves.failure import different_saves, early_hint, failure_text, late_hint, save_error
from muster.worker.saves.queue.calls import Call
from muster.worker.saves.queue.effects import Await, Clean, Order, Vote
from muster.worker.saves.queue.events import Cleaned, Decided, Event, OutcomeUnknown, WriteEnded
from muster.worker.saves.queue.save_traces import SaveTraces
from muster.worker.saves.queue.vote_payload import encoded, numbers

logger = logging.getLogger("muster.worker.saves.queue")  # As users know it.

EARLY_WARNING = 10.0
"""Seconds, plus the time of its own write, after which a rank logs which ranks a queue's first save waits
for. Ranks write for about as long as each other, so a rank that is later has often not begun. This is soon
enough for a person who has just started the job, and well below the timeout."""
LATE_WARNING = 60.0
"""Seconds, at the least, after which a rank logs which ranks a later save waits for."""
LATE_FACTOR = 3.0
"""A later save is late when it has waited so many times as long as the longest before it. The time is then
doubled from :data:`LATE_WARNING` on: a relay folds only arrivals with the same time."""


class Voter:
    """Waits and votes for the saves of one queue.

    Args:
        barrier: decides the saves.
        commits: decides the commits.
        timeout: seconds for a write, and for the other ranks' writes after it.
        traces: gets each save that is decided.
    """

    def __init__(
        self, barrier: GrpcBarrier, commits: GrpcBarrier, timeout: float, traces: SaveTraces
    ) -> None:
        self.orders: SimpleQueue[Order | None] = SimpleQueue()
        """None ends the thread."""
        self._barrier = barrier
        self._commits = commits
        self._timeout = timeout
        self._traces = traces
        self._agreed = False
        """Whether a save was released. If so, all ranks make the same saves."""
        self._longest_wait = 0.0
        """Seconds that a save has waited for the other ranks' writes, at most."""

    def serve(self, answer: Callable[[Event], None]) -> None:
        """Carry out orders, until told to end."""
        while self._serve_one(answer):
            pass  # Between orders this thread holds nothing of a save.

    def _serve_one(self, answer: Callable[[Event], None]) -> bool:
        order = self.orders.get()
        if order is None:
            return False
        answer(self.carry_out(order))
        return True

    def carry_out(self, order: Order) -> Event:
        """Carry out an order. Never raise, whatever a save's functions do: later saves need this thread."""
        match order:
            case Await():
                return WriteEnded(order.save, self._await(order.save))
            case Vote():
                return self._vote(order.save, order)
            case Clean():
                self._clean(order.save)
                return Cleaned(order.save)

    def _await(self, call: Call) -> str | None:
        """Wait for the end of a save's write.

        Returns:
            Why it failed; None if it did not.
        """
        failure: str | None = None
        try:
            if call.write is not None:
                ending = call.write.wait(self._timeout)
                failure, call.seconds = ending.failure, ending.seconds
                how = "failed" if failure is not None else "is done; the other ranks' are waited for"
                logger.info("%s: this rank's write, %.3f s, %s", call.name, call.seconds, how)
        except BaseException as error:
            # An unknown end is a failure too. Without a vote the other ranks would wait for this one.
            logger.exception("%s: its write cannot be judged", call.name)
            failure = failure_text(error)
        on_written, call.on_written = call.on_written, None
        try:
            if on_written is not None:
                on_written()
        except BaseException as error:
            logger.exception("%s: what follows its write failed", call.name)
            failure = failure or failure_text(error)
        return failure

    def _vote(self, call: Call, order: Vote) -> Event:
        error: MusterError | None
        try:
            decision = call.decision = self._decide(call, order)
            logger.info("%s is decided: %s", call.name, decision.message)
            error = None
            if not decision.released:
                error = save_error(call.name, call.idx, decision, written=call.written is not None)
        except OutcomeUnknownError as unknown:
            # The write has ended and its outcome is decided, or will be: ask until someone knows.
            logger.warning("%s", unknown)
            return OutcomeUnknown(call, unknown)
        except MusterError as refused:
            error = refused
        except BaseException as broken:  # Whatever it is, the saves that follow need this thread.
            logger.exception("%s cannot be decided", call.name)
            error = MusterError(f"{call.name} cannot be decided: {broken!r}")
        call.decided_at = time.monotonic()
        self._traces.decided(call)
        return Decided(call, error)

    def _decide(self, call: Call, order: Vote) -> Decision:
        """Return the ranks' decision on a save. If the coordinator was away, go on at the vote it was at."""
        if call.voted_at is None:
            call.voted_at = time.monotonic()
        if call.written is None:
            # The only place where a rank votes on its write; call.seconds says how long that took.
            payload = encoded(order.since_abort, b"" if order.failure is not None else call.word())
            report = replace(call.report, seconds=call.seconds, commits=call.commit is None)
            early = self._early_warning(call)
            asked = time.monotonic()
            decision = self._barrier.vote(order.failure, self._timeout, payload, early, report)
            if not decision.released:
                return decision
            call.written, call.written_at = decision, time.monotonic()
            self._longest_wait = max(self._longest_wait, call.written_at - asked)
            different = different_saves(numbers(decision.payloads))
            self._agreed = self._agreed or different is None
            if call.commit is None:
                return (
                    decision
                    if different is None
                    else replace(decision, outcome=Outcome.ABORTED, message=different)
                )
            call.commit_failure = different or _failure_of(call.commit, decision)
        report = replace(call.report, seconds=call.seconds, commits=True)
        return self._commits.vote(call.commit_failure, self._timeout, report=report)

    def _early_warning(self, call: Call) -> EarlyWarning:
        """Return when to warn: soon of ranks that perhaps make no saves, later of writers that may hang."""
        if self._agreed:
            after = LATE_WARNING
            while after < LATE_FACTOR * self._longest_wait:
                after *= 2
            return EarlyWarning(after, late_hint(call.name, self._barrier.run_id))
        return EarlyWarning(EARLY_WARNING + call.seconds, early_hint(call.name, self._barrier.rank))

    def _clean(self, call: Call) -> None:
        on_decided, call.on_decided, call.commit, call.word = call.on_decided, None, None, bytes
        try:
            if on_decided is not None:
                on_decided()
        except OSError as error:  # The save's own error has the traceback, if the same storage failed it.
            logger.warning("%s is over; its remains are removed later: %s", call.name, error)
        except BaseException:  # Torch's CheckpointException is no Exception.
            logger.exception("%s is over; cleaning up failed", call.name)
        call.owner = None


def _failure_of(commit: Callable[[Decision], None], decision: Decision) -> str | None:
    try:
        commit(decision)
    except BaseException as error:
        return failure_text(error)
    return None
