"""Asks connected processes what they are doing, and waits no longer than a moment for their answers."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from muster.service.core.vocabulary.effects import NO_RANKS, Asked, Inspect, Look
from muster.service.core.vocabulary.events import Seen, SeenOne, SessionId
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.driver import Driver
from muster.service.insight import words
from muster.v1.insight_pb2 import Inspected, Report

ANSWER_TIMEOUT = 2.0
"""Seconds that a process has to answer. Its session's thread takes milliseconds, if it can run at all."""
LOOK_SHARE = 0.75
"""Of the time that a barrier's missing are asked ahead: what they say must be here when it is to be told."""
MIN_SILENCE = 0.5
"""Seconds without an answer before a missing rank is said to give none: a busy machine needs some."""
MAX_THREADS = MAX_FRAMES = 64
"""Of an answer, and of one of its threads: as many as the SDK tells of."""
MAX_NAMED = 256
"""Barriers, or children, in an answer."""
MAX_REPORT = 64 << 10
"""Bytes of an answer about the main thread."""
MAX_WHOLE_REPORT = 2 << 20
"""Bytes of an answer about all threads; 64 of 64 frames with names of 200 bytes each are somewhat less."""
MAX_AT_ONCE = 4
"""So many questions that people ask may be open at once; each may concern every process of a run."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What came of asking one process."""

    asked: Asked
    report: Report | None
    """None: it said nothing."""
    why: str = ""
    """Why it said nothing."""


@dataclass(slots=True)
class _Question:
    waits_for: set[tuple[SessionId, int]]
    answers: dict[tuple[SessionId, int], Report | None]
    """None: it was too large."""
    all_threads: bool
    """Whether they were asked for, and not the main one alone."""
    complete: asyncio.Event


class Inspector:
    """Asks through the sessions that processes hold.

    Args:
        driver: carries the questions, and takes what the core is to tell of the missing.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._questions: dict[int, _Question] = {}
        self._last = 0
        self._people = 0
        """Questions of people that are open."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, processes: Sequence[Asked]) -> list[Sighting]:
        """Ask for people; of a single process for all its threads.

        Args:
            processes: whom; those without a session are answered for at once.

        Returns:
            What each said, in their order.

        Raises:
            Refusal: LIMIT_EXCEEDED: too many people ask at once.
        """
        self._check_room()
        self._people += 1
        try:
            return await self._ask(processes, ANSWER_TIMEOUT, all_threads=len(processes) == 1)
        finally:
            self._people -= 1

    def _check_room(self) -> None:
        if self._people >= MAX_AT_ONCE:
            raise Refusal(
                Reason.LIMIT_EXCEEDED,
                f"{self._people} inspections are under way, and no more than {MAX_AT_ONCE} may be "
                "(max_inspections). Ask again in a few seconds.",
                limit="max_inspections",
                value=MAX_AT_ONCE,
            )

    def look(self, look: Look) -> None:
        """Ask on behalf of a barrier, and hand in what is seen; nobody waits for it."""
        if look.processes:
            task = asyncio.get_running_loop().create_task(self._look(look))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _look(self, look: Look) -> None:
        seconds = LOOK_SHARE * look.ahead
        sights = (
            SeenOne(one.asked.rank, one.asked.incarnation, words.line(one.report) if one.report else one.why)
            for one in await self._ask(look.processes, seconds)
            if one.report or one.why != words.NO_ANSWER or seconds >= MIN_SILENCE
        )
        self._driver.submit(Seen(look.run_id, tuple(sights)))

    async def _ask(
        self, processes: Sequence[Asked], seconds: float, *, all_threads: bool = False
    ) -> list[Sighting]:
        self._last += 1
        number = self._last
        lines: dict[SessionId, set[int]] = {}
        for one in processes:
            if one.session is not None:
                lines.setdefault(one.session, set()).add(one.rank)
        waits_for = {(session, rank) for session, ranks in lines.items() for rank in ranks}
        question = self._questions[number] = _Question(waits_for, {}, all_threads, asyncio.Event())
        try:
            message = Inspect(number, all_threads)
            relayed = {one.session for one in processes if one.relayed}
            for session, ranks in lines.items():
                self._driver.tell(session, message, frozenset(ranks) if session in relayed else NO_RANKS)
            if waits_for:
                async with asyncio.timeout(seconds):
                    await question.complete.wait()
        except TimeoutError:
            pass  # Who has not answered is told of as such.
        finally:
            del self._questions[number]
        return list(_sightings(processes, question))

    def hear(self, session: SessionId, answer: Inspected) -> None:
        """Take an answer. One that nobody waits for, or waits for no more, is of no interest."""
        question = self._questions.get(answer.question)
        key = session, answer.rank
        if question is None or key not in question.waits_for:
            return
        question.waits_for.discard(key)
        question.answers[key] = answer.report if _is_bounded(answer, question.all_threads) else None
        if not question.waits_for:
            question.complete.set()


def _is_bounded(answer: Inspected, all_threads: bool) -> bool:
    """Whether it is no more than was asked for; the SDK keeps to less."""
    report = answer.report
    return (
        answer.ByteSize() <= (MAX_WHOLE_REPORT if all_threads else MAX_REPORT)
        and len(report.threads) <= (MAX_THREADS if all_threads else 1)
        and all(len(thread.frames) <= MAX_FRAMES for thread in report.threads)
        and len(report.waits_at) <= MAX_NAMED
        and len(report.saves) <= MAX_NAMED
    )


def _sightings(processes: Sequence[Asked], question: _Question) -> Iterable[Sighting]:
    for one in processes:
        if one.session is None:
            yield Sighting(one, None, words.NO_SESSION)
        elif (key := (one.session, one.rank)) not in question.answers:
            yield Sighting(one, None, words.NO_ANSWER)
        elif (said := question.answers[key]) is None:
            yield Sighting(one, None, words.TOO_LARGE)
        elif said.declined:
            yield Sighting(one, None, words.DECLINED)
        else:
            yield Sighting(one, said)
