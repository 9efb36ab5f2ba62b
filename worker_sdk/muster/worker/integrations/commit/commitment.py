"""One save that all ranks make together, or none, whatever it is that writes."""

import atexit
import logging
import os
import re
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, TypeAlias

from torch.distributed import DistError
from torch.distributed.checkpoint import CheckpointException

from muster.checkpoint.committed import UncommittedError
from muster.worker.barriers import GrpcBarrier
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import MusterError, OutcomeUnknownError, error_for
from muster.worker.groups.write_report import MAX_STEP, WriteReport
from muster.worker.saves.failure import failure_text
from muster.worker.saves.queue.groups import Group
from muster.worker.transport.fork_guard import start_thread

logger = logging.getLogger(__name__)

OnLost: TypeAlias = Literal["raise", "abort"]
"""What becomes of this process if a rank is lost, or does not come: the call of the framework raises, as far
as no collective holds it up; or the process is aborted, for whoever started it to start it again."""
PACE = 10.0
"""Seconds until the first word of a rank that is not done; between two of them, twice as long each time."""
LONGEST_PACE = 120.0
"""Seconds between two such words, at most."""
LOOK = 1.0
"""Seconds between two looks whether a save that others wait for can still be decided."""
LAST_WORD = 15.0
"""Seconds that the end of a process may wait for what became of its save: a little more than the
coordinator's default session TTL, after which a dead rank is lost."""
OVERDUE = "it has not done its part of the save for"
"""How the reason begins of a rank whose main thread takes longer than the timeout."""
COLLECTIVES = {"torch.distributed.distributed_c10d", "torch.distributed._functional_collectives"}
"""The modules in which torch's collectives raise."""
DONE, NOT_YET, GIVEN_UP = b"", b"not yet", b"given up"
"""What a rank hands in at a barrier of a save. The usual word is empty: each rank is sent those of all."""
WORDS = frozenset({DONE, NOT_YET, GIVEN_UP})
BEGINS = b"\0"
"""How the first word of a save begins, the one that says which save it is; no path has this in it."""
AGAIN = b"\1"
"""Comes before the name of a save that does not come after all others of this rank."""
LONGEST_NAME = 64
"""Bytes of a save's name in that word, at most: its end, where the steps are."""
STEP = re.compile(r"(?:step|checkpoint|ckpt|iter|iteration)[\W_]?([0-9]+)", re.IGNORECASE)
"""Finds the training step in a save's name."""
LATE = 30.0
"""Seconds that a rank waits for the others, at first, which began, or gave up, before it came: a little more
than ranks are apart that are at the same save."""
LONGER = 4
"""How many times longer than those before a rank waits which had waited so in vain."""


class ElsewhereError(UncommittedError):
    """Another rank has failed at what all were to do, and says itself why."""


class Commitment:
    """Speaks for this rank while all make one save, from a thread of its own.

    The main thread may hang in a collective of the framework. So the thread arrives at a barrier when the
    rank begins, and at the next when it has written, or has not after a while; then it goes on to another,
    until all have written at one. At each moment of the save a barrier waits for all ranks, and so whoever is
    lost or does not come is named to all others. In the same way all hear whether rank 0 has committed it.

    Where a rank has left a save at a moment at which the others have not, it is at another than they when
    they meet again. So each says at first which save it begins: whoever is behind gives his up, the others
    wait for him, and all begin the same one, at one barrier. Only names that go up tell who is behind: nobody
    waits, or goes on to where others wait, for a save with a name that was used before.

    Args:
        barrier: of all ranks that save. The saves of its group are made one after the other.
        timeout: seconds that a rank may take for its part, and that it is waited for at each barrier.
        on_lost: what becomes of this process if a rank is lost, or does not come in time.
        pace: seconds until the first word of a rank that is not done.
        name: the save's, the same on all ranks, in the order in which they are made, as ``step-9`` comes
            before ``step-10``.
        parts: the number of parts of a rank's work. No rank begins a part before all have done the last one.

    Attributes:
        rank: this one's.
        number: of the save: where this rank's first barrier of it was to be.
        caller: the thread that makes it.

    Raises:
        OutcomeUnknownError: the coordinator cannot be reached, and the last save waits for it.
        ValueError: ``on_lost`` is neither, or the timeout is no time.
    """

    def __init__(
        self,
        barrier: GrpcBarrier,
        timeout: float,
        on_lost: OnLost = "raise",
        pace: float = PACE,
        name: str = "",
        parts: int = 1,
    ) -> None:
        if on_lost not in ("raise", "abort"):
            raise ValueError(f'on_lost = {on_lost!r}: it must be "raise" or "abort".')
        if not 0 < timeout < float("inf"):
            raise ValueError(f"timeout = {timeout!r}: it must be a number of seconds above 0.")
        self._owner = os.getpid()
        self.caller = threading.current_thread()
        self.rank = barrier.rank
        self._barrier = barrier
        self._timeout = timeout
        self._on_lost = on_lost
        self._pace = pace
        self._changed = threading.Condition()
        """Guards what follows."""
        self._attended = False
        """Whether its thread has begun."""
        self._begun: Decision | None = None
        """That all have begun it."""
        self._parts = parts
        self._done = 0
        """How many parts this rank has done."""
        self._committed = False
        """Of rank 0: whether it has done what is to be done when all have written."""
        self._claimed = False
        """Of rank 0: whether it is committed, unless that fails."""
        self._failure: str | None = None
        """Why this rank has failed at what it was to do."""
        self._given_up = False
        self._decisions: list[Decision] = []
        """For each part, the decision that all ranks have done it; the last may say that they have not."""
        self._confirmation: Decision | None = None
        """That rank 0 has committed it, or that it has not."""
        self._error: MusterError | None = None
        """Why that is not known, or not so."""
        self._report = WriteReport(step=step_of(name))
        """Describes this rank's part of the save, for people."""
        self._began: float | None = None
        """When all ranks had begun the save, on the monotonic clock."""
        self._over = threading.Event()
        try:
            take_turn(barrier, self)
            said = name.encode("utf-8", "backslashreplace")[-LONGEST_NAME:]
            self._goes_up = _goes_up(barrier, said)
            self._word = BEGINS + (b"" if self._goes_up else AGAIN) + said
            self.number = barrier.sequence
            start_thread("a save", f"muster-commit-{barrier.rank}", self._attend)
        except BaseException:
            with self._changed:
                if self._attended:  # An interruption came after that.
                    self._given_up = True
                    self._changed.notify_all()
                else:
                    self._over.set()
            raise

    def begun(self) -> int:
        """Wait until all ranks have begun this save.

        Returns:
            Its number, the same on all ranks.

        Raises:
            BarrierError: not all have come; the message names who has not.
            MusterError: the others are at a later save.
            OutcomeUnknownError: the coordinator cannot be reached, so that this rank does not know.
            RefusedError: it refused this process.
        """
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._begun or self._decisions or self._error)
                if self._begun is not None:
                    return self._begun.sequence
                if self._error is not None:
                    raise self._error
                raise error_for(self._decisions[-1])
        except MusterError:
            self.give_up()  # It may be begun yet, when the coordinator is there again.
            raise
        except BaseException as error:  # An interruption.
            self.failed(failure_text(error))
            raise

    def written(self) -> Decision:
        """Say that this rank has written, and wait until all have. Called once for each part of its work.

        Returns:
            The decision.

        Raises:
            BarrierError: not all have written; the message names who has not, and why.
            MusterError: a rank gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached, so that this rank does not know.
            RefusedError: it refused this process.
        """
        with self._changed:
            self._done += 1
            if self._began is not None and self._done == 1:
                self._report = replace(self._report, seconds=time.monotonic() - self._began)
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: (
                    len(self._decisions) >= self._done or self._failing is not None or self._error is not None
                )
            )
            if self._failing is not None:
                raise error_for(self._failing)
            if self._error is not None:
                raise self._error
            return self._decisions[self._done - 1]

    @property
    def _failing(self) -> Decision | None:
        """The decision by which a part of the save has failed on all ranks; None if none has."""
        last = self._decisions[-1] if self._decisions else None
        return None if last is None or last.outcome is Outcome.RELEASED else last

    def claim(self) -> None:
        """Of rank 0, when all have written: it is committed now, and may not fail any more for being late.

        Raises:
            MusterError: all have been told that it has failed.
        """
        with self._changed:
            if self._failure is not None or self._over.is_set():
                raise MusterError(
                    f'save {self.number} of group "{self._barrier.prefix}" has failed for all ranks before '
                    f"it was committed: {self._failure or self._confirmation or self._error}"
                )
            self._claimed = True

    def committed(self) -> None:
        """Of rank 0, when all have written: say that the save is a checkpoint now; does not wait."""
        with self._changed:
            self._committed = True
            self._changed.notify_all()

    def confirmed(self) -> None:
        """When all have written: wait until rank 0 has committed it.

        Raises:
            BarrierError: rank 0 could not commit it, or was lost before it said that it has.
            MusterError: rank 0 gave the save up.
            OutcomeUnknownError: the coordinator cannot be reached, so that this rank does not know.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._confirmation is not None or self._error is not None)
            if self._confirmation is not None and self._confirmation.outcome is not Outcome.RELEASED:
                raise error_for(self._confirmation)
            if self._error is not None:
                raise self._error

    def ending(self, timeout: float) -> MusterError | None:
        """When this rank has failed or given up: wait until all have heard of it.

        Args:
            timeout: seconds.

        Returns:
            Why the save has failed, for all ranks alike; None if that is not known by then.
        """
        self.join(timeout)
        with self._changed:
            decision = self._confirmation or self._failing
            if decision is not None and decision.outcome is not Outcome.RELEASED:
                return error_for(decision)
            return self._error

    def failed(self, reason: str) -> None:
        """Say that this rank has failed, and with it the save of all; does not wait.

        Args:
            reason: why, for all.
        """
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def give_up(self) -> None:
        """Say that the framework's call has ended before it was done, as it does if a collective fails.

        Nobody is to blame for that but whoever is lost, of whom the others then hear; does not wait.
        """
        if os.getpid() == self._owner:  # Else a lock may be held by a thread that is not here.
            with self._changed:
                self._given_up = True
                self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the save has come to an end on all ranks.

        Args:
            timeout: seconds; None: for as long as that takes. In a forked child it is over.
        """
        if os.getpid() == self._owner:
            self._over.wait(timeout)

    @property
    def is_over(self) -> bool:
        """Whether the save has come to an end on all ranks."""
        return self._over.is_set()

    def check_reached(self) -> None:
        """See that the coordinator can still be asked how it ends.

        Raises:
            OutcomeUnknownError: for long it could not be.
        """
        with self._changed:
            if isinstance(self._error, OutcomeUnknownError) and not self.is_over:
                raise self._error

    # ------------------------------------------------------------------ the thread

    def _attend(self) -> None:
        with self._changed:
            if self.is_over:
                return
            self._attended = True
        leads = self._barrier.rank == 0
        try:
            decision = self._begin()
            while decision.outcome is Outcome.RELEASED:
                with self._changed:
                    self._begun = self._begun or decision
                    self._began = self._began or time.monotonic()
                    self._changed.notify_all()
                decision = self._until_done(1)
                if self._goes_up or not (self._goes_on and GIVEN_UP in decision.payloads.values()):
                    break
                # Others have only now given up an earlier save of this name: here all begin.
                decision = self._begin()
            for part in range(1, self._parts + 1):
                if part > 1:
                    decision = self._until_done(part)
                if not self._settle(decision, "not all ranks have written save {}", aborts=True):
                    return  # The others have nothing more to do.
            confirmation = self._until_all(lambda: self._committed or not leads, commits=True)
            otherwise = "all ranks have written save {}, and whether it was committed is not known"
            self._settle(confirmation, otherwise, aborts=not leads)
        except MusterError as error:
            self._tell(error)
        except Exception as error:  # Whatever it is, the main thread waits for this one.
            logger.exception("save %d", self.number)
            self._tell(MusterError(f"save {self.number} cannot be decided: {error!r}"))
        finally:
            self._over.set()

    @property
    def _goes_on(self) -> bool:
        """Whether the main thread is still in the midst of it."""
        with self._changed:
            return not self._done and not self._given_up and self._failure is None

    def _begin(self) -> Decision:
        """Go from barrier to barrier until all begin this save at one, or it comes to nothing.

        Raises:
            MusterError: the others are at a later save.
        """
        late: Decision | None = None
        timeout = self._timeout
        overdue = time.monotonic() + self._timeout
        while True:
            decision = self._vote(
                None, self._word, timeout, lambda word: word.startswith(BEGINS), self._report
            )
            if decision.outcome is Outcome.RELEASED:
                if set(decision.payloads.values()) <= {self._word}:
                    return decision
                self._check_ahead(decision.payloads, waits=time.monotonic() < overdue)
                timeout = self._timeout  # Who is behind is on his way.
            elif self._goes_up and self.rank in {missing.rank for missing in decision.missing}:
                # It was decided before this rank came: another save may have, or the others wait further on.
                late = late or decision
                timeout = _patience(decision, self._timeout)
            else:
                return late or decision

    def _check_ahead(self, words: Mapping[int, bytes], *, waits: bool) -> None:
        """Where the ranks begin different saves: go on with this one, if the others are still to come to it.

        Raises:
            MusterError: they are not, or it was given up.
        """
        others = {rank: word for rank, word in sorted(words.items()) if word != self._word}
        where = ", ".join(f"rank {rank} at {_name_of(word)!r}" for rank, word in others.items())
        what = f'save {_name_of(self._word)!r} of group "{self._barrier.prefix}"'
        with self._changed:
            if self._given_up or self._failure is not None:
                raise MusterError(f"{what} was given up before all had begun it: {where}.")
        if not (waits and self._goes_up and all(map(self._is_behind, others.values()))):
            raise MusterError(
                f"{what} is given up: not all ranks make it, since {where}. The next one may be of all."
            )
        logger.warning("%s waits: %s", what, where)

    def _is_behind(self, word: bytes) -> bool:
        """Whether who says this has still to come to this save."""
        return not word.startswith(BEGINS + AGAIN) and _order(word) < _order(self._word)

    def _until_done(self, part: int) -> Decision:
        """Wait until all ranks have done a number of parts."""
        return self._until_all(lambda: self._done >= part)

    def _until_all(self, done: Callable[[], bool], *, commits: bool = False) -> Decision:
        """Go from barrier to barrier until all ranks are done at one, or one fails.

        Args:
            done: returns whether this rank is done.
            commits: whether the save is a checkpoint once all ranks are done.
        """
        longest = min(LONGEST_PACE, self._timeout / 3)
        pace = min(self._pace, longest)
        overdue = time.monotonic() + self._timeout
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: done() or self._failure is not None or self._given_up, timeout=pace
                )
                waits = not done() and not self._given_up and not self._claimed
                if waits and time.monotonic() >= overdue:
                    self._failure = self._failure or f"{OVERDUE} {self._timeout:g} s"
                word = DONE if done() else GIVEN_UP if self._given_up else NOT_YET
                failure = None if done() else self._failure
                report = replace(self._report, commits=commits and word == DONE, gives_up=word == GIVEN_UP)
            decision = self._vote(failure, word, self._timeout, WORDS.__contains__, report)
            words = decision.payloads.values()
            if decision.outcome is not Outcome.RELEASED or NOT_YET not in words or GIVEN_UP in words:
                return decision
            pace = min(2 * pace, longest)

    def _settle(self, decision: Decision, otherwise: str, *, aborts: bool) -> bool:
        """Let the main thread hear whether all were done; if not, people too, for that thread may hang."""
        quitters = sorted(rank for rank, word in decision.payloads.items() if word == GIVEN_UP)
        error = None
        if quitters:
            error = MusterError(
                f'save {self.number} of group "{self._barrier.prefix}" was given up: the call that makes it '
                f"ended on ranks {quitters} before they were done. Their own errors say why."
            )
        with self._changed:
            if len(self._decisions) < self._parts:
                self._decisions.append(decision)
            else:
                self._confirmation = decision
            self._error = error
            self._changed.notify_all()
        if decision.outcome is Outcome.RELEASED and error is None:
            return True
        logger.error("%s: %s", otherwise.format(self.number), error or decision.message)
        hangs = any(failure.reason.startswith(OVERDUE) for failure in decision.failures)
        lost = hangs or decision.outcome in (Outcome.MEMBER_LOST, Outcome.TIMED_OUT)
        if aborts and lost and self._on_lost == "abort":
            logger.critical("process %d is aborted: its collectives may wait for ever", os.getpid())
            os.abort()
        return False

    def _vote(
        self,
        failure: str | None,
        word: bytes,
        timeout: float,
        is_known: Callable[[bytes], bool],
        report: WriteReport,
    ) -> Decision:
        """Arrive; while the coordinator is away, go on asking."""
        while True:
            try:
                decision = self._barrier.vote(failure, timeout, word, report=report)
            except OutcomeUnknownError as error:
                self._tell(error)
            else:
                with self._changed:
                    self._error = None
                if strangers := sorted(word for word in decision.payloads.values() if not is_known(word)):
                    raise out_of_step(self._barrier, f"some say {strangers[0]!r} where all make a save")
                return decision

    def _tell(self, error: MusterError) -> None:
        logger.warning("save %d: %s", self.number, error)
        with self._changed:
            self._error = error
            self._changed.notify_all()


def is_of_a_save(word: bytes) -> bool:
    """Whether a rank that says this at a barrier makes a save."""
    return word in WORDS or word.startswith(BEGINS)


def step_of(name: str) -> int | None:
    """Return the training step in a save's name: ``step-9``, ``checkpoint-500``, ``iter_0000500``.

    Returns:
        None if the name has none.
    """
    found = STEP.findall(name)
    step = int(found[-1]) if found else None
    return step if step is not None and step <= MAX_STEP else None


def _name_of(word: bytes) -> str:
    return word.removeprefix(BEGINS).removeprefix(AGAIN).decode("utf-8", "replace")


def _patience(missed: Decision, timeout: float) -> float:
    """Seconds that a rank waits for others which did not wait for it.

    It may be the first there, and then they have as long to come: if some have waited so in vain before,
    ranks are further apart than that.
    """
    polled = missed.outcome is Outcome.TIMED_OUT and missed.wait < timeout - 1
    return min(timeout, max(LATE, LONGER * missed.wait if polled else 0.0))


def _order(word: bytes) -> tuple[list[str | int], bytes]:
    """What to sort the names of saves by: as people would, by the numbers in them."""
    parts = re.split(r"([0-9]+)", _name_of(word))
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], word


@contextmanager
def report_failure(commitment: Commitment) -> Iterator[None]:
    """What is raised here is this rank's failure, and everyone's; or a collective's, and then another's.

    Raises:
        MusterError: a collective failed; this is why, if the coordinator says so within ``LAST_WORD``.
    """
    try:
        yield
    except BaseException as error:
        if is_own(error, commitment.rank):
            commitment.failed(failure_text(error))
            raise
        commitment.give_up()
        if (reason := commitment.ending(LAST_WORD)) is not None:
            raise reason from error
        raise


def is_own(error: BaseException, rank: int) -> bool:
    """Whether a rank that raises is to blame itself, as far as can be told."""
    if isinstance(error, CheckpointException):
        return rank in error.failures
    if isinstance(error, (ElsewhereError, DistError)):
        return False
    frames = [frame.f_globals.get("__name__") for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_a_collective = COLLECTIVES.intersection(frames[-3:]) or "gloo" in str(error)
    return not (isinstance(error, RuntimeError) and of_a_collective)


_last: dict[Group, Commitment] = {}
"""By group, the save that was begun last."""
_highest: dict[Group, bytes] = {}
"""By group, of the names of its saves the one that comes after the others."""
_last_lock = threading.Lock()


def take_turn(barrier: GrpcBarrier, following: Commitment | None = None) -> None:
    """Wait until the last save of a barrier's group is over, which another thread may be in the midst of.

    Whoever arrives at it meanwhile takes a place that is that save's, and the ranks are out of step.

    Args:
        barrier: the group's.
        following: the save for which the next ones have to wait.

    Raises:
        OutcomeUnknownError: the coordinator cannot be reached, and that save waits for it.
    """
    group = Group.of(barrier)
    while True:
        with _last_lock:
            last = _last.get(group)
            if last is None or last.is_over:
                # Not before: who is interrupted here must not have the next one begin beside the last.
                if following is not None:
                    _last[group] = following
                return
        if last.caller is threading.current_thread() or not last.caller.is_alive():
            last.give_up()  # The framework has raised out of it, without a word.
        last.join(LOOK)
        last.check_reached()


def _goes_up(barrier: GrpcBarrier, name: bytes) -> bool:
    """Whether a save comes after all that were begun before, as far as names tell; it is begun now."""
    group = Group.of(barrier)
    with _last_lock:
        highest = _highest.get(group, b"")
        if _order(name) <= _order(highest):
            return False
        _highest[group] = name
        return True


def out_of_step(barrier: GrpcBarrier, why: str) -> MusterError:
    """The error of ranks that do different things at one barrier; nothing may come of that.

    Args:
        barrier: the group's.
        why: how that is known.
    """
    return MusterError(
        f'the ranks are out of step in group "{barrier.prefix}" of run {barrier.run_id}: {why}. Call saves '
        "and loads in the same order on all ranks, and restart the job."
    )


def _hear_the_end() -> None:
    """At the end of the process, which a collective that failed may have brought: hear who is lost."""
    with _last_lock:
        last_ones = list(_last.values())
    deadline = time.monotonic() + LAST_WORD
    for last in last_ones:
        last.give_up()
        last.join(max(0.0, deadline - time.monotonic()))


def _begin_anew() -> None:
    """In a forked child, which makes none of its parent's saves."""
    global _last_lock
    _last_lock = threading.Lock()
    _last.clear()


atexit.register(_hear_the_end)
os.register_at_fork(after_in_child=_begin_anew)
