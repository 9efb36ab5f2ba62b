"""Where the processes of a run stand, for the page and its twin: asked for once, and no more than fits."""

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from muster.service.core import report
from muster.service.core.effects import Asked
from muster.service.core.refusal import Reason, Refusal
from muster.service.insight import crowds, words
from muster.service.insight.inspector import Sighting
from muster.v1.insight_pb2 import Crowd, Report, StacksResponse, Thread

Ask: TypeAlias = Callable[[Sequence[Asked]], Awaitable[Sequence[Sighting]]]
"""Asks processes what they do; raises a Refusal if too many people do."""

MOST_CROWDS = 100
"""Places on one page."""
MOST_OF_ONE = 64
"""Threads of a process, frames of a thread, and whatever else a process tells: as many as the SDK does."""
MOST_NAME = 200
"""Characters of a name."""
MOST_COUNTED = 2**32 - 1
"""The greatest number of things left out; a process may claim as many."""


@dataclass(frozen=True, slots=True)
class Wish:
    """Of whom a viewer wants to know."""

    run_id: str
    ranks: tuple[int, ...] = ()
    """Empty: of all."""
    missing: str = ""
    """Only those that the open barrier of this group waits for; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksLook:
    """Where processes of a run stand."""

    taken_at: float
    """Seconds since 1970."""
    wish: Wish
    told: StacksResponse
    """No more than fits."""
    answered: int
    asked: int
    differ: str
    """Who stands elsewhere than most; empty: nobody."""
    crowds_left_out: int


def read_wish(run_id: str, ranks: Iterable[str], missing: str | None) -> Wish:
    """Read what a viewer wants: ``?rank=3&rank=5&missing=checkpoint``.

    Raises:
        Refusal: INVALID_ARGUMENT.
    """
    for rank in ranks:
        if not re.fullmatch("[0-9]{1,10}", rank):
            raise Refusal(
                Reason.INVALID_ARGUMENT,
                f'"{report.shown(rank)}" is no rank. Give a number for each, such as ?rank=3&rank=5.',
            )
    if missing == "":
        raise Refusal(
            Reason.INVALID_ARGUMENT, "missing is empty. Name the group's prefix, such as ?missing=checkpoint."
        )
    return Wish(run_id, tuple(sorted(set(map(int, ranks)))), missing or "")


def fold(taken_at: float, wish: Wish, sightings: Iterable[Sighting]) -> StacksLook:
    """What is to be shown of processes that were asked."""
    told = crowds.stacks(sightings)
    answered = sum(len(crowd.members) for crowd in told.crowds)
    asked = answered + sum(len(crowd.members) for crowd in told.silent)
    differing = words.differing(told)
    differ = words.differ(differing) if differing else ""
    crowds_left_out = max(0, len(told.crowds) - MOST_CROWDS)
    del told.crowds[MOST_CROWDS:]
    for crowd in told.crowds:
        # Of several processes only the main threads were asked for.
        _bound(crowd, MOST_OF_ONE if asked == 1 else 1)
    return StacksLook(
        taken_at=taken_at,
        wish=wish,
        told=told,
        answered=answered,
        asked=asked,
        differ=differ,
        crowds_left_out=crowds_left_out,
    )


# ---------------------------------------------------------------------- bounds
# The SDK keeps to less, but a process may send whatever it likes.


def _bound(crowd: Crowd, most_threads: int) -> None:
    for member in crowd.members:
        _bound_report(member.report)
    more = len(crowd.threads) - most_threads
    if more > 0:
        own = crowd.members[0].report
        own.threads_left_out = min(MOST_COUNTED, own.threads_left_out + more)
        del crowd.threads[most_threads:]
    for thread in crowd.threads:
        _bound_thread(thread)


def _bound_report(own: Report) -> None:
    del own.waits_at[MOST_OF_ONE:]
    own.waits_at[:] = map(_cut, own.waits_at)
    del own.saves[MOST_OF_ONE:]
    for child in own.saves:
        child.state = _cut(child.state)


def _bound_thread(thread: Thread) -> None:
    more = len(thread.frames) - MOST_OF_ONE
    if more > 0:
        thread.frames_left_out = min(MOST_COUNTED, thread.frames_left_out + more)
        del thread.frames[MOST_OF_ONE:]
    thread.name = _cut(thread.name)
    for frame in thread.frames:
        frame.function = _cut(frame.function)
        frame.file = _cut(frame.file)


def _cut(name: str) -> str:
    return name if len(name) <= MOST_NAME else f"{name[:MOST_NAME]}…"
