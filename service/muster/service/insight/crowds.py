"""Folds what processes said: whoever stands at the same place is told of as one."""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from muster.service.insight import words
from muster.service.insight.inspector import Sighting
from muster.v1.insight_pb2 import Crowd, Onlooked, Report, StacksResponse, Thread

Key: TypeAlias = bytes | str


def stacks(sightings: Iterable[Sighting]) -> StacksResponse:
    """What is to be told of processes that were asked, the most frequent place first."""
    by_place: dict[Key, list[Sighting]] = {}
    by_why: dict[Key, list[Sighting]] = {}
    for one in sightings:
        if one.report is not None:
            by_place.setdefault(_place(one.report), []).append(one)
        else:
            by_why.setdefault(one.why, []).append(one)
    return StacksResponse(crowds=_ordered(by_place, _crowd), silent=_ordered(by_why, _silent))


def _ordered(folded: dict[Key, list[Sighting]], crowd: Callable[[list[Sighting]], Crowd]) -> list[Crowd]:
    return [crowd(alike) for alike in sorted(folded.values(), key=len, reverse=True)]


def _place(report: Report) -> bytes:
    """Where the main thread stands."""
    main = words.main_of(report) or Thread()
    return Thread(frames=main.frames).SerializeToString(deterministic=True)


def _crowd(alike: list[Sighting]) -> Crowd:
    first = alike[0].report
    assert first is not None
    # The main thread is the first.
    threads = sorted(first.threads, key=lambda thread: not thread.main)
    if len(alike) == 1:
        line = words.line(first)
    else:
        threads = [thread for thread in threads if thread.main]
        line = words.place(words.main_of(first))
    crowd = Crowd(threads=threads, line=line)
    crowd.members.extend(map(_member, alike))
    return crowd


def _silent(alike: list[Sighting]) -> Crowd:
    return Crowd(members=map(_member, alike), line=alike[0].why)


def _member(one: Sighting) -> Onlooked:
    """Without its threads, which are let go of: its crowd has them by now."""
    if one.report is not None:
        one.report.ClearField("threads")
    return Onlooked(rank=one.asked.rank, host=one.asked.host, pid=one.asked.pid, report=one.report)
