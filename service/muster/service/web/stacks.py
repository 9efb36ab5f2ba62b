"""Where the processes of a run stand, for the page and its twin: asked for once, and no more than fits."""

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import ProbeTarget
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.insight import crowds, words
from muster.service.insight.inspector import ProcessAnswer
from muster.v1.insight_pb2 import Crowd, StacksResponse

Ask: TypeAlias = Callable[[Sequence[ProbeTarget]], Awaitable[Sequence[ProcessAnswer]]]
"""Asks processes what they do; raises a Refusal if too many people do."""

MOST_CROWDS = 100
"""Places on one page."""
MOST_NAME = 200
"""Characters of a name."""


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


def fold(taken_at: float, wish: Wish, sightings: Iterable[ProcessAnswer]) -> StacksLook:
    """What is to be shown of processes that were asked."""
    told = crowds.stacks(sightings)
    answered, asked = words.answered(told)
    differing = words.differing(told)
    differ = words.differ(differing) if differing else ""
    crowds_left_out = max(0, len(told.crowds) - MOST_CROWDS)
    del told.crowds[MOST_CROWDS:]
    for crowd in told.crowds:
        _cut_names(crowd)
    return StacksLook(
        taken_at=taken_at,
        wish=wish,
        told=told,
        answered=answered,
        asked=asked,
        differ=differ,
        crowds_left_out=crowds_left_out,
    )


# ---------------------------------------------------------------------- names
# The inspector takes no more of anything than is asked for; but a single name may fill an answer.


def _cut_names(crowd: Crowd) -> None:
    for member in crowd.members:
        own = member.report
        own.waits_at[:] = map(_cut, own.waits_at)
        for child in own.saves:
            child.state = _cut(child.state)
    for thread in crowd.threads:
        thread.name = _cut(thread.name)
        for frame in thread.frames:
            frame.function = _cut(frame.function)
            frame.file = _cut(frame.file)


def _cut(name: str) -> str:
    return name if len(name) <= MOST_NAME else f"{name[:MOST_NAME]}…"
