"""Inspections: which processes are asked, how long the inspector waits, and hostile answers."""

import asyncio
from collections.abc import Set as AbstractSet

import pytest

from muster.service.core.vocabulary.effects import Inspect, Message, ProbeRequest, ProbeTarget
from muster.service.core.vocabulary.events import Event, ProbeResult, ProbeResults
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.insight import inspector as module
from muster.service.insight import words
from muster.service.insight.inspector import MAX_AT_ONCE, MAX_REPORT, Inspector
from muster.v1.insight_pb2 import ChildOfSave, Frame, Inspected, Report, Thread

REPORT = Report(
    threads=[Thread(name="MainThread", main=True, frames=[Frame(function="f", file="t.py", line=3)])]
)


class Sessions:
    """Takes questions as a driver does, and answers for the processes that the test chooses."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Inspect, AbstractSet[int]]] = []
        self.submitted: asyncio.Queue[Event] = asyncio.Queue()
        self.inspector = Inspector(self)  # type: ignore[arg-type]
        self.answers: dict[int, list[Inspected]] = {}

    def tell(self, session: int, message: Message, ranks: AbstractSet[int]) -> None:
        assert isinstance(message, Inspect)
        self.messages.append((session, message, ranks))
        for answer in self.answers.get(session, []):
            answer.question = answer.question or message.question
            self.inspector.hear(session, answer)

    def submit(self, event: Event) -> None:
        self.submitted.put_nowait(event)


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> Sessions:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT", 0.05)
    return Sessions()


def process(rank: int, session: int | None, *, relayed: bool = False) -> ProbeTarget:
    return ProbeTarget(session, rank, f"life-{rank}", "node-0", 100 + rank, relayed)


async def test_each_is_asked_once_and_a_line_once_for_all_its_ranks(sessions: Sessions):
    sessions.answers = {
        1: [Inspected(rank=0, report=REPORT)],
        2: [Inspected(rank=rank, report=REPORT) for rank in (1, 2)],
    }
    line = [process(rank, 2, relayed=True) for rank in (1, 2)]
    found = await sessions.inspector.ask([process(0, 1), *line])
    assert [one.report for one in found] == [REPORT] * 3
    assert [(session, ranks) for session, _, ranks in sessions.messages] == [(1, frozenset()), (2, {1, 2})]
    assert {message.all_threads for _, message, _ in sessions.messages} == {False}


async def test_single_process_is_asked_for_all_its_threads(sessions: Sessions):
    await sessions.inspector.ask([process(0, 1)])
    assert sessions.messages[0][1].all_threads


async def test_silent_process_is_reported_as_silent(sessions: Sessions):
    sessions.answers = {
        2: [Inspected(rank=2, report=Report(declined=True))],
        3: [Inspected(rank=3, report=Report(waits_at=["x" * MAX_REPORT]))],
    }
    found = await sessions.inspector.ask([process(0, None), *(process(rank, rank) for rank in (1, 2, 3))])
    assert [(one.report, one.why) for one in found] == [
        (None, words.NO_SESSION),
        (None, words.NO_ANSWER),
        (None, words.DECLINED),
        (None, words.TOO_LARGE),
    ]


@pytest.mark.parametrize(
    "many",
    [
        Report(threads=[Thread(main=not n) for n in range(65)]),
        Report(threads=[Thread(frames=[Frame(library=True)] * 65)]),
        Report(waits_at=["x"] * 257),
        Report(saves=[ChildOfSave(pid=1)] * 257),
    ],
    ids=["threads", "frames", "barriers", "children"],
)
async def test_answer_of_many_small_things_is_too_large_as_well(sessions: Sessions, many: Report):
    sessions.answers = {1: [Inspected(rank=0, report=many)]}
    assert [one.why for one in await sessions.inspector.ask([process(0, 1)])] == [words.TOO_LARGE]


async def test_threads_that_were_not_asked_for_are_too_many(sessions: Sessions):
    two = Report(threads=[Thread(main=True), Thread()])
    sessions.answers = {rank: [Inspected(rank=rank, report=two)] for rank in range(3)}
    (alone,) = await sessions.inspector.ask([process(0, 0)])
    assert alone.report == two
    of_two = await sessions.inspector.ask([process(1, 1), process(2, 2)])
    assert [one.why for one in of_two] == [words.TOO_LARGE] * 2


async def test_probe_that_was_too_short_calls_no_process_unresponsive(sessions: Sessions):
    sessions.answers = {1: [Inspected(rank=0, report=REPORT)]}
    sessions.inspector.probe(ProbeRequest("job", (process(0, 1), process(1, 2), process(2, None)), 0.05))
    seen = await sessions.submitted.get()
    assert isinstance(seen, ProbeResults)
    assert [(one.rank, one.doing) for one in seen.results] == [
        (0, "main thread in f, t.py:3"),
        (2, words.NO_SESSION),
    ]


async def test_process_without_a_session_is_not_asked(sessions: Sessions):
    assert await sessions.inspector.ask([]) == []
    assert [one.why for one in await sessions.inspector.ask([process(0, None)])] == [words.NO_SESSION]
    assert sessions.messages == []


@pytest.mark.parametrize(
    "answer",
    [
        Inspected(question=99, rank=0, report=REPORT),
        Inspected(rank=1, report=REPORT),
        Inspected(rank=-5, report=REPORT),
    ],
    ids=["to another question", "for another's rank", "for no rank"],
)
async def test_answer_that_no_question_awaits_is_dropped(sessions: Sessions, answer: Inspected):
    sessions.answers = {7: [answer]}
    found = await sessions.inspector.ask([process(0, 7), process(1, 8)])
    assert [one.report for one in found] == [None, None]


async def test_first_answer_counts(sessions: Sessions):
    sessions.answers = {
        1: [Inspected(rank=0, report=REPORT), Inspected(rank=0, report=Report(declined=True))],
    }
    (found, _) = await sessions.inspector.ask([process(0, 1), process(1, 2)])
    assert found.report == REPORT


async def test_people_ask_only_so_many_questions_at_once(sessions: Sessions):
    asking = [asyncio.create_task(sessions.inspector.ask([process(0, 1)])) for _ in range(MAX_AT_ONCE)]
    await asyncio.sleep(0)
    with pytest.raises(Refusal, match="max_inspections") as caught:
        await sessions.inspector.ask([process(0, 1)])
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    await asyncio.gather(*asking)
    await sessions.inspector.ask([process(0, 1)])


async def test_answers_to_a_probe_are_submitted(sessions: Sessions):
    sessions.answers = {1: [Inspected(rank=0, report=REPORT)]}
    sessions.inspector.probe(ProbeRequest("job", (process(0, 1), process(1, 2)), 0.7))
    assert await sessions.submitted.get() == ProbeResults(
        "job",
        (ProbeResult(0, "life-0", "main thread in f, t.py:3"), ProbeResult(1, "life-1", words.NO_ANSWER)),
    )
    sessions.inspector.probe(ProbeRequest("job", (), 2.0))
    assert len(sessions.messages) == 2
