"""The protocol by which all ranks commit one save, on one rank: a pure state machine.

It knows no thread, no clock and no barrier. Its driver sends each vote of :meth:`SaveProtocol.next_vote` to
the barrier, and hands the decision to :meth:`SaveProtocol.heard`::

    BEGINNING --all begin it--> WRITING --all have written--> CONFIRMING --rank 0 has committed--> OVER
        ^                          |
        +--others only now give up-+        Each stage ends in OVER if the save fails.

- BEGINNING: each rank says which save it begins. Ranks can be at different saves, if some left the last one
  at a moment at which others did not. The ranks that are behind give their saves up; the others wait.
- WRITING: each rank votes when it has done a part of its work. A rank that is not done votes "not yet" after
  a while, so a barrier always waits for all ranks, and a lost rank is named. No rank begins a part before all
  have done the one before.
- CONFIRMING: rank 0 commits the save; the other ranks wait for that.
"""

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from muster.worker.decision import Decision, Outcome
from muster.worker.errors import MusterError, OutcomeUnknownError, error_for
from muster.worker.groups.write_report import WriteReport
from muster.worker.integrations.commit.words import (
    BEGINS,
    DONE,
    GIVEN_UP,
    NOT_YET,
    REUSED,
    WORDS,
    name_in,
    order_of,
    out_of_step,
)

PACE = 10.0
"""Seconds until a rank that is not done votes "not yet" for the first time; each next time, twice as long."""
MAX_PACE = 120.0
"""Seconds between two such votes, at most."""
OVERDUE = "it has not done its part of the save for"
"""How the reason of a rank begins that takes longer than the timeout."""
LATE = 30.0
"""Seconds that a rank first waits for others that arrived before it: a little more than ranks at the same
save are apart."""
LONGER = 4
"""Multiplier applied to the previous timed-out wait."""


class Stage(enum.Enum):
    """How far a save is."""

    BEGINNING = enum.auto()
    WRITING = enum.auto()
    CONFIRMING = enum.auto()
    OVER = enum.auto()


@dataclass(frozen=True, slots=True)
class Ballot:
    """A vote to send to the barrier."""

    failure: str | None
    word: bytes
    timeout: float
    report: WriteReport


@dataclass(frozen=True, slots=True)
class Notice:
    """What people must know after a decision."""

    level: int
    text: str
    rank_lost: bool = False
    """Whether a rank is lost or hangs, so that collectives may wait for it for ever."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a save's protocol is given at its start."""

    prefix: str
    run_id: str
    rank: int
    number: int
    """The sequence of the save's first barrier."""
    word: bytes
    """The word that says which save it is."""
    timeout: float
    """Seconds that a rank may take for its part, and that it is waited for at each barrier."""
    pace: float = PACE
    parts: int = 1
    """The number of parts of a rank's work."""

    @property
    def goes_up(self) -> bool:
        """Whether the save's name comes after those of all earlier saves of this rank."""
        return not self.word.startswith(BEGINS + REUSED)

    @property
    def save(self) -> str:
        """The save, for people."""
        return f'save {name_in(self.word)!r} of group "{self.prefix}"'


class SaveProtocol:
    """One save on one rank.

    Args:
        terms: what is known at its start.
        report: describes this rank's part of the save, for people.
        now: seconds on a monotonic clock, as everywhere here.

    Attributes:
        stage: how far the save is.
        begun: the decision by which all ranks began the save; None before that.
        agreed: for each part, the decision that all ranks have done it.
        error: why the save has failed, or why that is not known yet (``OutcomeUnknownError``).
    """

    def __init__(self, terms: Terms, report: WriteReport, now: float) -> None:
        self._terms = terms
        self._report = report
        self.stage = Stage.BEGINNING
        self.begun: Decision | None = None
        self.agreed: list[Decision] = []
        self.error: MusterError | None = None
        self._failed: Decision | None = None
        """The decision by which the save has failed."""
        self._committed = False
        """Whether rank 0 has committed the save."""
        self._done = 0
        """How many parts this rank has done; on rank 0 the commit counts as one more."""
        self._committing = False
        """On rank 0: whether the commit is under way, which must not count as late."""
        self.failure: str | None = None
        """Why this rank cannot do its part."""
        self._given_up = False
        self._begun_at: float | None = None
        self._missed: Decision | None = None
        """The first decision that was made before this rank arrived."""
        self._pace = terms.pace
        self._enter(Stage.BEGINNING, now)

    # ------------------------------------------------------------------ what this rank does

    def part_done(self, now: float, size: int | None = None) -> int:
        """Record that this rank has done a part of its work.

        Args:
            now: seconds of the monotonic clock.
            size: bytes of this rank's share, if they are known by now.

        Returns:
            How many it has done.
        """
        self._done += 1
        if self._begun_at is not None and self._done == 1:
            self._report = replace(self._report, seconds=now - self._begun_at)
        if size is not None:
            self._report = replace(self._report, bytes=size)
        return self._done

    def fail(self, reason: str) -> None:
        """Record that this rank has failed; the first reason stays."""
        self.failure = self.failure or reason

    def give_up(self) -> None:
        """Record that the framework's call ended before this rank was done."""
        self._given_up = True

    def claim(self) -> None:
        """Record that rank 0 begins to commit.

        Raises:
            MusterError: the save has failed already.
        """
        if self.failure is not None or self.stage is Stage.OVER:
            raise MusterError(
                f'save {self._terms.number} of group "{self._terms.prefix}" has failed for all ranks before '
                f"it was committed: {self.failure or self._failed or self.error}"
            )
        self._committing = True

    def commit(self) -> None:
        """Record that rank 0 has committed."""
        self._committed = True

    # ------------------------------------------------------------------ what is known

    @property
    def reason(self) -> MusterError | None:
        """Why the save has failed, or why that is not known yet; None if nothing is wrong."""
        return error_for(self._failed) if self._failed is not None else self.error

    @property
    def is_over(self) -> bool:
        """Whether this rank has nothing more to say."""
        return self.stage is Stage.OVER

    # ------------------------------------------------------------------ votes and decisions

    def next_vote(self, now: float) -> Ballot | None:
        """Return the vote to send; None if this rank waits until :attr:`speaks_at`, or for its own work."""
        terms = self._terms
        if self.stage is Stage.BEGINNING:
            return Ballot(None, terms.word, self._patience, self._report)
        done = self._has_done
        stopped = self.failure is not None or self._given_up
        if self.stage is Stage.OVER or not (done or stopped or now >= self.speaks_at):
            return None
        if not (done or self._given_up or self._committing) and now >= self._overdue_at:
            self.fail(f"{OVERDUE} {terms.timeout:g} s")
        word = DONE if done else GIVEN_UP if self._given_up else NOT_YET
        commits = self.stage is Stage.CONFIRMING and done
        report = replace(self._report, commits=commits, gives_up=word == GIVEN_UP)
        return Ballot(None if done else self.failure, word, terms.timeout, report)

    def heard(self, decision: Decision, now: float) -> Notice | None:
        """Take the decision on the last vote.

        Returns:
            What people must know of it.
        """
        self.error = None
        if strangers := sorted(word for word in decision.payloads.values() if not self._is_expected(word)):
            why = f"some say {strangers[0]!r} where all make a save"
            return self.break_off(out_of_step(self._terms.prefix, self._terms.run_id, why))
        if self.stage is Stage.BEGINNING:
            return self._heard_beginning(decision, now)
        words = decision.payloads.values()
        if decision.outcome is Outcome.RELEASED and NOT_YET in words and GIVEN_UP not in words:
            self._pace = min(2 * self._pace, self._max_pace)
            self.speaks_at = now + self._pace
            return None
        if self._others_only_now_give_up(decision):
            self._enter(Stage.BEGINNING, now)
            return None
        return self._settle(decision, now)

    def not_heard(self, error: OutcomeUnknownError) -> None:
        """Take that the coordinator cannot be reached; the last vote is sent again."""
        self.error = error

    def break_off(self, error: MusterError) -> Notice:
        """End the save for a reason that is not a decision."""
        self.stage, self.error = Stage.OVER, error
        return Notice(logging.WARNING, f"save {self._terms.number}: {error}")

    # ------------------------------------------------------------------ beginning

    def _heard_beginning(self, decision: Decision, now: float) -> Notice | None:
        terms = self._terms
        if decision.outcome is Outcome.RELEASED:
            others = {rank: word for rank, word in decision.payloads.items() if word != terms.word}
            if others:
                return self._heard_others(others, now)
            self.begun = self.begun or decision
            self._begun_at = now if self._begun_at is None else self._begun_at
            self._enter(Stage.WRITING, now)
            return None
        if terms.goes_up and terms.rank in {missing.rank for missing in decision.missing}:
            # It was decided before this rank came: another save may have, or the others wait further on.
            self._missed = self._missed or decision
            self._patience = _patience(decision, terms.timeout)
            return None
        return self._settle(self._missed or decision, now)

    def _heard_others(self, others: Mapping[int, bytes], now: float) -> Notice:
        """Wait for ranks that begin earlier saves, or end this save if they will not come to it."""
        terms = self._terms
        where = ", ".join(f"rank {rank} at {name_in(word)!r}" for rank, word in sorted(others.items()))
        if self._given_up or self.failure is not None:
            why = f"{terms.save} was given up before all had begun it: {where}."
            return self.break_off(MusterError(why))
        waits = now < self._overdue_at and terms.goes_up
        if not (waits and all(map(self._is_behind, others.values()))):
            why = f"not all ranks make it, since {where}. The next one may be of all."
            return self.break_off(MusterError(f"{terms.save} is given up: {why}"))
        self._patience = terms.timeout  # The others are on their way.
        return Notice(logging.WARNING, f"{terms.save} waits: {where}")

    def _is_behind(self, word: bytes) -> bool:
        """Return whether a rank that says this has still to come to this save."""
        return not word.startswith(BEGINS + REUSED) and order_of(word) < order_of(self._terms.word)

    def _others_only_now_give_up(self, decision: Decision) -> bool:
        """Return whether others give up an earlier save of this name only now, so that all begin again."""
        in_the_midst = not self._done and not self._given_up and self.failure is None
        first = self.stage is Stage.WRITING and not self.agreed
        given_up = GIVEN_UP in decision.payloads.values()
        return first and not self._terms.goes_up and in_the_midst and given_up

    # ------------------------------------------------------------------ writing and confirming

    @property
    def _has_done(self) -> bool:
        if self.stage is Stage.CONFIRMING:
            return self._terms.rank != 0 or self._committed
        return self._done > len(self.agreed)

    def _is_expected(self, word: bytes) -> bool:
        return word.startswith(BEGINS) if self.stage is Stage.BEGINNING else word in WORDS

    def _settle(self, decision: Decision, now: float) -> Notice | None:
        """End a stage: all ranks were done at one barrier, or the save has failed."""
        number, confirming = self._terms.number, self.stage is Stage.CONFIRMING
        quitters = sorted(rank for rank, word in decision.payloads.items() if word == GIVEN_UP)
        if decision.outcome is Outcome.RELEASED and not quitters:
            if confirming:
                self.stage = Stage.OVER
                return None
            self.agreed.append(decision)
            all_written = len(self.agreed) == self._terms.parts
            self._enter(Stage.CONFIRMING if all_written else Stage.WRITING, now)
            return None
        self.stage = Stage.OVER
        if decision.outcome is not Outcome.RELEASED:
            self._failed = decision
        else:
            self.error = MusterError(
                f'save {number} of group "{self._terms.prefix}" was given up: the call that makes it '
                f"ended on ranks {quitters} before they were done. Their own errors say why."
            )
        what = f"not all ranks have written save {number}"
        if confirming:
            what = f"all ranks have written save {number}, and whether it was committed is not known"
        hangs = any(failure.reason.startswith(OVERDUE) for failure in decision.failures)
        lost = hangs or decision.outcome in (Outcome.MEMBER_LOST, Outcome.TIMED_OUT)
        # Rank 0 may be in the midst of the commit.
        lost = lost and not (confirming and self._terms.rank == 0)
        return Notice(logging.ERROR, f"{what}: {self.error or decision.message}", lost)

    def _enter(self, stage: Stage, now: float) -> None:
        self.stage = stage
        self._patience = self._terms.timeout
        """Seconds that the others are waited for at the next barrier of BEGINNING."""
        self._missed = None
        self._overdue_at = now + self._terms.timeout
        self._max_pace = min(MAX_PACE, self._terms.timeout / 3)
        self._pace = min(self._terms.pace, self._max_pace)
        self.speaks_at = now + self._pace
        """When a rank that is not done votes next."""


def _patience(missed: Decision, timeout: float) -> float:
    """Return the seconds that a rank waits for others that did not wait for it.

    It may be the first to arrive, and then the others have as long to come. If some have waited so in vain
    before, ranks are further apart than that.
    """
    polled = missed.outcome is Outcome.TIMED_OUT and missed.wait < timeout - 1
    return min(timeout, max(LATE, LONGER * missed.wait if polled else 0.0))
