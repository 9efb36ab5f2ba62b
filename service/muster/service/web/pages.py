"""The status page: HTML made of views, without asking anyone.

Whatever is shown passes through :func:`visible` and is then escaped by Jinja, wherever a template puts it.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from muster.service import cells
from muster.service.core import barrier_views, views
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.model import MemberState, MissingState, Save
from muster.service.core.vocabulary.refusal import Refusal
from muster.service.insight import words as insight_words
from muster.service.rounds import rounds_of
from muster.service.savepoint import asked_text, save_text
from muster.service.saves import SAVES
from muster.service.version import VERSION
from muster.service.web import links
from muster.service.web.look import Overview, RunLook, named
from muster.service.web.rankmap import RankMap, rank_map
from muster.service.web.stacks import StacksLook
from muster.service.wire import milliseconds, rendezvous_to_pb, save_to_pb, timestamp_to_pb
from muster.v1 import coordinator_pb2, insight_pb2

FOLDED_ABOVE = 16
"""Hosts in a list that is longer, and the stacks of further places, are shown when someone asks for them."""
HURRY = 0.2
"""With less than this part of its timeout left, a barrier's time is shown as pressing."""
STATES = {
    MemberState.CONNECTED: "connected",
    MemberState.IDLE: "idle",
    MemberState.DISCONNECTED: "disconnected",
    MemberState.LOST: "lost",
    MemberState.LEFT: "left",
    MemberState.EVICTED: "evicted",
}
"""How a process stands, in the order that counts for a rank with several."""
NEVER_JOINED = "never joined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The missing ranks of a barrier whose reasons are of one kind."""

    id: str
    """Of the element, the same at every look."""
    state: str
    words: str
    ranks: str
    count: int
    hosts: int
    rows: Sequence[report.MissingOfHost]

    @property
    def open(self) -> bool:
        """Whether the rows are shown at once."""
        return len(self.rows) <= FOLDED_ABOVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An open barrier."""

    view: barrier_views.BarrierView
    hurry: bool
    few: bool
    """Whether the missing are named one by one."""
    missing: Sequence[Missing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A barrier that is over."""

    view: barrier_views.BarrierView
    outcome: str
    why: str
    """The first line of the report, without the barrier's name."""
    more: Sequence[str]
    """The other lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The processes of a run, host by host."""

    map: RankMap
    counts: dict[str, int]
    """Ranks by state."""
    trouble: Sequence[views.HostView]
    well: Sequence[views.HostView]
    """Where all are connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Processes at the same place, or without an answer for the same reason."""

    who: str
    line: str
    facts: str
    """What a single process says of itself beside its threads."""
    threads: Sequence[insight_pb2.Thread]
    """The main one first."""
    threads_left_out: int
    open: bool
    """Whether its main thread is shown at once."""


def visible(value: object) -> object:
    """What is printed in a template: control characters are made visible, in text that is data."""
    if not isinstance(value, str) or hasattr(value, "__html__") or value.isprintable():
        return value
    return report.printable(value).replace("\n", "\\n")


def _duration(seconds: float) -> str:
    return cells.duration(milliseconds(seconds))


def _moment(wall: float) -> str:
    """A moment, in UTC, to the second."""
    return str(timestamp_to_pb(round(wall)).ToJsonString())


def _to_the_second(moment: str) -> str:
    """A moment of the wire, which has microseconds."""
    return re.sub(r"\.\d+Z$", "Z", moment)


def _ago(then: float, now: float) -> str:
    return _duration(max(0.0, now - then))


def _in_order(numbers: Iterable[int]) -> str:
    """Numbers folded into ranges, but not sorted: the process ids of ranks."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1][1:] = [number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=visible,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters.update(
        duration=_duration,
        moment=_moment,
        to_the_second=_to_the_second,
        ago=_ago,
        size=cells.size,
        ranges=report.ranges,
        in_order=_in_order,
        missing_one=report.missing_one,
        why_missing=report.why_missing,
    )
    environment.globals.update(
        run_page=links.run_page,
        run_twin=links.run_twin,
        stacks_page=links.stacks_page,
        stacks_twin=links.stacks_twin,
        saves=SAVES,
        command=report.command,
        steps=cells.steps,
        nothing="–",
        version=VERSION,
    )
    return environment


_TEMPLATES = _environment()


def overview_page(overview: Overview, root: str) -> str:
    """The page of all runs.

    Args:
        overview: what to show.
        root: the way from the page to the root of the site.
    """
    open_barriers = sum(run.open_barriers for run in overview.runs)
    return _TEMPLATES.get_template("overview.html").render(
        root=root,
        overview=overview,
        waiting=[_waiting(view) for view in overview.waiting],
        more_waiting=open_barriers - len(overview.waiting),
        decided=[_decided(view, in_full=False) for view in overview.decided],
        connected=sum(run.connected for run in overview.runs),
        members=sum(run.members for run in overview.runs),
        open_barriers=open_barriers,
    )


def standby_page(address: str, leader: str, replicas: Sequence[coordinator_pb2.Replica], trouble: str) -> str:
    """The page of a replica that does not lead.

    Args:
        address: its own.
        leader: that of the leader; empty: nobody leads.
        replicas: all that are there.
        trouble: why it could not take over now; empty if it could.
    """
    return _TEMPLATES.get_template("standby.html").render(
        root="", address=address, leader=leader, replicas=replicas, trouble=trouble
    )


def run_page(look: RunLook, root: str) -> str:
    """The page of one run; arguments as of :func:`overview_page`."""
    return _TEMPLATES.get_template("run.html").render(
        root=root,
        look=look,
        run=look.run,
        waiting=[_waiting(view) for view in look.waiting],
        more_waiting=look.run.open_barriers - len(look.waiting),
        decided=[
            _decided(view, in_full=index < named(look.decided)) for index, view in enumerate(look.decided)
        ],
        members=_members(look),
        rendezvous=look.rendezvous,
        rounds=rounds_of(rendezvous_to_pb(look.rendezvous)),
        save=_save(look.run.save) if look.run.save is not None else "",
        standstill=_standstill(look),
    )


def _standstill(look: RunLook) -> str:
    """Who is behind in training, and for how long nobody has moved; empty if no rank tells."""
    steps = look.run.steps
    if steps is None or look.still is None:
        return ""
    return cells.standstill(steps.lowest, steps.highest, steps.lowest_rank, look.still)


def _save(save: Save) -> str:
    """What became of the save that was asked for last."""
    shown = save_to_pb(save)
    return f"{save_text(shown)} (asked for by {asked_text(shown)})"


def stacks_page(look: StacksLook, root: str) -> str:
    """The page of where processes of a run stand; arguments as of :func:`overview_page`."""
    told = look.told
    return _TEMPLATES.get_template("stacks.html").render(
        root=root,
        look=look,
        wish=look.wish,
        crowds=[
            _crowd(crowd, insight_words.crowd(crowd.members), open=at < FOLDED_ABOVE)
            for at, crowd in enumerate(told.crowds)
        ],
        silent=[_crowd(crowd, insight_words.singly(crowd.members), open=False) for crowd in told.silent],
    )


def refusal_page(refusal: Refusal, root: str, *, renews: bool = True) -> str:
    """The page of what cannot be shown.

    Args:
        refusal: why.
        root: as of :func:`overview_page`.
        renews: whether it renews itself, until there is something to show.
    """
    return _TEMPLATES.get_template("refusal.html").render(root=root, refusal=refusal, renews=renews)


def _waiting(view: barrier_views.BarrierView) -> Waiting:
    few = len(view.missing) <= report.MAX_NAMED_SINGLY
    return Waiting(
        view=view,
        hurry=view.remaining < HURRY * (view.age + view.remaining),
        few=few,
        missing=() if few else tuple(_missing(view)),
    )


def _missing(view: barrier_views.BarrierView) -> Iterator[Missing]:
    """Who is missing: the gone first, then those who are there and have not come."""
    of_state: dict[MissingState, list[report.MissingOfHost]] = {}
    for of_host in report.by_host(view.missing):
        of_state.setdefault(of_host.state, []).append(of_host)
    for state in sorted(of_state, key=lambda state: (state is MissingState.NOT_ARRIVED, state)):
        rows = of_state[state]
        ranks = [rank for row in rows for rank in row.ranks]
        yield Missing(
            id=_id(view.run_id, view.prefix, view.sequence, state),
            state=state.name,
            words=report.MISSING_WORDS[state],
            ranks=report.ranges(ranks),
            count=len(ranks),
            hosts=len({row.host for row in rows} - {""}),
            rows=rows,
        )


def _decided(view: barrier_views.BarrierView, *, in_full: bool) -> Decided:
    """A decision; ``in_full``: with all who were missing from it."""
    name = report.printable(report.barrier_name(view.run_id, view.prefix, view.sequence))
    headline, *more = view.message.split("\n")
    return Decided(
        view=view,
        outcome=view.decision.outcome.name if view.decision is not None else "",
        why=headline.removeprefix(name).strip(),
        more=more if in_full else (),
    )


def _members(look: RunLook) -> Members:
    standing: dict[int, str] = {}
    preference = list(STATES)
    for host in sorted(look.hosts, key=lambda host: preference.index(host.state)):
        for rank in host.ranks:
            standing.setdefault(rank, STATES[host.state])
    for view in look.waiting:
        for one in view.missing:
            if one.state is MissingState.NEVER_JOINED:
                standing.setdefault(one.rank, NEVER_JOINED)
    ranks: dict[str, list[int]] = {}
    for rank, words in standing.items():
        ranks.setdefault(words, []).append(rank)
    return Members(
        map=rank_map(ranks),
        counts={words: len(ranks[words]) for words in [*STATES.values(), NEVER_JOINED] if words in ranks},
        trouble=[host for host in look.hosts if host.state is not MemberState.CONNECTED],
        well=[host for host in look.hosts if host.state is MemberState.CONNECTED],
    )


def _crowd(crowd: insight_pb2.Crowd, who: str, *, open: bool) -> Crowd:
    alone = insight_words.alone(crowd)
    return Crowd(
        who=who,
        line=crowd.line,
        facts=insight_words.facts(alone) if alone is not None else "",
        threads=[
            thread
            for thread in crowd.threads
            if thread.frames or thread.frames_left_out  # That the main one has ended is said.
        ],
        threads_left_out=alone.threads_left_out if alone is not None else 0,
        open=open,
    )


def _id(*parts: object) -> str:
    """A name for an element, that no data can choose."""
    return "m" + hashlib.blake2s(repr(parts).encode(), digest_size=8).hexdigest()
