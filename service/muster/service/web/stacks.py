"""The stacks of a run's processes, for the page and its JSON view, cut to a bounded size."""

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
"""Asks processes for their stacks. It raises a Refusal if too many requests are under way."""

MAX_CROWDS = 100
"""Crowds on one page: processes at the same place are one crowd."""
MAX_NAME = 200
"""Characters of a name."""


@dataclass(frozen=True, slots=True)
class StackQuery:
    """The processes that a viewer asks for."""

    run_id: str
    ranks: tuple[int, ...] = ()
    """Empty: all ranks."""
    missing: str = ""
    """A group's prefix: only the ranks that its open barrier waits for; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StacksData:
    """The data of the stacks page."""

    taken_at: float
    """Seconds since 1970."""
    query: StackQuery
    response: StacksResponse
    """At most :data:`MAX_CROWDS` crowds."""
    answered: int
    asked: int
    differ: str
    """A sentence about the ranks that are not where most are; empty if there are no such ranks."""
    crowds_left_out: int


def parse_query(run_id: str, ranks: Iterable[str], missing: str | None) -> StackQuery:
    """Parse the query of a URL: ``?rank=3&rank=5&missing=checkpoint``.

    Raises:
        Refusal: INVALID_ARGUMENT.
    """
    for rank in ranks:
        if not re.fullmatch("[0-9]{1,10}", rank):
            raise Refusal(
                Reason.INVALID_ARGUMENT,
                f'"{report.shown(rank)}" is not a rank. Give a number for each, such as ?rank=3&rank=5.',
            )
    if missing == "":
        raise Refusal(
            Reason.INVALID_ARGUMENT, "missing is empty. Name the group's prefix, such as ?missing=checkpoint."
        )
    return StackQuery(run_id, tuple(sorted(set(map(int, ranks)))), missing or "")


def build_stacks(taken_at: float, query: StackQuery, sightings: Iterable[ProcessAnswer]) -> StacksData:
    """Group the answers of processes by where they are, and cut them to a bounded size."""
    response = crowds.stacks(sightings)
    answered, asked = words.answered(response)
    differing = words.differing(response)
    differ = words.differ(differing) if differing else ""
    crowds_left_out = max(0, len(response.crowds) - MAX_CROWDS)
    del response.crowds[MAX_CROWDS:]
    for crowd in response.crowds:
        _cut_names(crowd)
    return StacksData(
        taken_at=taken_at,
        query=query,
        response=response,
        answered=answered,
        asked=asked,
        differ=differ,
        crowds_left_out=crowds_left_out,
    )


# ---------------------------------------------------------------------- names
# The inspector bounds how many threads and frames a process sends, but not how long a single name is.


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
    return name if len(name) <= MAX_NAME else f"{name[:MAX_NAME]}…"
