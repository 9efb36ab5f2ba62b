"""Asks connected processes what they are doing, and waits a short time for their answers."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from muster.service.core.vocabulary.effects import NO_RANKS, Inspect, ProbeRequest, ProbeTarget
from muster.service.core.vocabulary.events import ProbeResult, ProbeResults
from muster.service.core.vocabulary.model import SessionId
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.driver import Driver
from muster.service.insight import words
from muster.v1.insight_pb2 import Inspected, Report

ANSWER_TIMEOUT = 2.0
"""Seconds that a process has to answer. The session's thread takes milliseconds if it can run at all."""
PROBE_SHARE = 0.75
"""The part of the time before a progress report in which missing ranks must answer to be in the report."""
MIN_SILENCE = 0.5
"""Seconds without an answer before a missing rank counts as unresponsive: a busy machine needs some time."""
MAX_THREADS = MAX_FRAMES = 64
"""Threads of an answer, and frames of a thread: the SDK sends no more."""
MAX_NAMED = 256
"""Barriers, or children, in an answer."""
MAX_REPORT = 64 << 10
"""Bytes of an answer about the main thread only."""
MAX_WHOLE_REPORT = 2 << 20
"""Bytes of an answer about all threads: 64 threads of 64 frames with names of 200 bytes are somewhat less."""
MAX_AT_ONCE = 4
"""Inspections by people that may be open at once. Each may ask every process of a run."""


@dataclass(frozen=True, slots=True)
class ProcessAnswer:
    """The answer of one process, or why there is no answer."""

    asked: ProbeTarget
    report: Report | None
    """None: the process gave no answer."""
    why: str = ""
    """Why the process gave no answer."""


@dataclass(slots=True)
class _Question:
    waits_for: set[tuple[SessionId, int]]
    answers: dict[tuple[SessionId, int], Report | None]
    """None: the answer was too large."""
    all_threads: bool
    """Whether all threads were asked for, and not only the main thread."""
    complete: asyncio.Event


class Inspector:
    """Asks processes over their sessions.

    Args:
        driver: sends the questions, and receives the answers that the core needs.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._questions: dict[int, _Question] = {}
        self._last = 0
        self._people = 0
        """Open inspections by people."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, processes: Sequence[ProbeTarget]) -> list[ProcessAnswer]:
        """Ask for people. A single process is asked for all its threads.

        Args:
            processes: the processes to ask. A process without a session gives no answer.

        Returns:
            The answer of each process, in their order.

        Raises:
            Refusal: LIMIT_EXCEEDED: too many inspections are open.
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

    def probe(self, look: ProbeRequest) -> None:
        """Ask on behalf of a barrier, and submit the answers later."""
        if look.processes:
            task = asyncio.get_running_loop().create_task(self._probe(look))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _probe(self, look: ProbeRequest) -> None:
        seconds = PROBE_SHARE * look.ahead
        seen = (
            ProbeResult(
                one.asked.rank, one.asked.incarnation, words.line(one.report) if one.report else one.why
            )
            for one in await self._ask(look.processes, seconds)
            if one.report or one.why != words.NO_ANSWER or seconds >= MIN_SILENCE
        )
        self._driver.submit(ProbeResults(look.run_id, tuple(seen)))

    async def _ask(
        self, processes: Sequence[ProbeTarget], seconds: float, *, all_threads: bool = False
    ) -> list[ProcessAnswer]:
        self._last += 1
        number = self._last
        ranks_of: dict[SessionId, set[int]] = {}
        for one in processes:
            if one.session is not None:
                ranks_of.setdefault(one.session, set()).add(one.rank)
        waits_for = {(session, rank) for session, ranks in ranks_of.items() for rank in ranks}
        question = self._questions[number] = _Question(waits_for, {}, all_threads, asyncio.Event())
        try:
            message = Inspect(number, all_threads)
            relayed = {one.session for one in processes if one.relayed}
            for session, ranks in ranks_of.items():
                self._driver.tell(session, message, frozenset(ranks) if session in relayed else NO_RANKS)
            if waits_for:
                async with asyncio.timeout(seconds):
                    await question.complete.wait()
        except TimeoutError:
            pass  # The missing answers are reported as such.
        finally:
            del self._questions[number]
        return list(_answers(processes, question))

    def hear(self, session: SessionId, answer: Inspected) -> None:
        """Take an answer, and drop it unless a question waits for it."""
        question = self._questions.get(answer.question)
        key = session, answer.rank
        if question is None or key not in question.waits_for:
            return
        question.waits_for.discard(key)
        question.answers[key] = answer.report if _is_bounded(answer, question.all_threads) else None
        if not question.waits_for:
            question.complete.set()


def _is_bounded(answer: Inspected, all_threads: bool) -> bool:
    """Return whether an answer is within the limits; the SDK sends less."""
    report = answer.report
    return (
        answer.ByteSize() <= (MAX_WHOLE_REPORT if all_threads else MAX_REPORT)
        and len(report.threads) <= (MAX_THREADS if all_threads else 1)
        and all(len(thread.frames) <= MAX_FRAMES for thread in report.threads)
        and len(report.waits_at) <= MAX_NAMED
        and len(report.saves) <= MAX_NAMED
    )


def _answers(processes: Sequence[ProbeTarget], question: _Question) -> Iterable[ProcessAnswer]:
    for one in processes:
        if one.session is None:
            yield ProcessAnswer(one, None, words.NO_SESSION)
        elif (key := (one.session, one.rank)) not in question.answers:
            yield ProcessAnswer(one, None, words.NO_ANSWER)
        elif (said := question.answers[key]) is None:
            yield ProcessAnswer(one, None, words.TOO_LARGE)
        elif said.declined:
            yield ProcessAnswer(one, None, words.DECLINED)
        else:
            yield ProcessAnswer(one, said)
