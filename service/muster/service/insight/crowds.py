"""Groups the answers of processes whose main threads stand at the same place."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from muster.service.insight import words
from muster.service.insight.inspector import ProcessAnswer
from muster.v1.insight_pb2 import Crowd, ProbedProcess, Report, StacksResponse, Thread

Key: TypeAlias = bytes | str


def stacks(answers: Iterable[ProcessAnswer]) -> StacksResponse:
    """Group the answers of processes, the most frequent place first."""
    by_place: dict[Key, list[ProcessAnswer]] = {}
    by_why: dict[Key, list[ProcessAnswer]] = {}
    for one in answers:
        if one.report is not None:
            by_place.setdefault(_place(one.report), []).append(one)
        else:
            by_why.setdefault(one.why, []).append(one)
    return StacksResponse(crowds=_ordered(by_place, _crowd), silent=_ordered(by_why, _silent))


def _ordered(
    folded: dict[Key, list[ProcessAnswer]], crowd: Callable[[list[ProcessAnswer]], Crowd]
) -> list[Crowd]:
    return [crowd(alike) for alike in sorted(folded.values(), key=len, reverse=True)]


def _place(report: Report) -> bytes:
    """Return a key for the place at which the main thread stands."""
    main = words.main_of(report) or Thread()
    return Thread(frames=main.frames).SerializeToString(deterministic=True)


def _crowd(alike: list[ProcessAnswer]) -> Crowd:
    first = alike[0].report
    assert first is not None
    # The main thread comes first.
    threads = sorted(first.threads, key=lambda thread: not thread.main)
    if len(alike) == 1:
        line = words.line(first)
    else:
        threads = [thread for thread in threads if thread.main]
        line = words.place(words.main_of(first))
    crowd = Crowd(threads=threads, line=line)
    crowd.members.extend(map(_member, alike))
    return crowd


def _silent(alike: list[ProcessAnswer]) -> Crowd:
    return Crowd(members=map(_member, alike), line=alike[0].why)


def _member(one: ProcessAnswer) -> ProbedProcess:
    """Make the entry of one process, and free its threads: the crowd has them by now."""
    if one.report is not None:
        one.report.ClearField("threads")
    return ProbedProcess(rank=one.asked.rank, host=one.asked.host, pid=one.asked.pid, report=one.report)
