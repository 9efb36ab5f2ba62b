"""The status page as HTML, made from the data alone.

Every value passes through :func:`visible`. Then Jinja escapes it, wherever a template puts it.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from muster.service.core import barrier_views, views
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.model import MemberState, MissingState, Save
from muster.service.core.vocabulary.refusal import Refusal
from muster.service.formatting import cells
from muster.service.formatting.local_checkpoints import (
    CheckpointRow,
    KeeperRow,
    checkpoint_rows,
    keeper_rows,
    newest_of_levels,
)
from muster.service.formatting.requested_saves import asked_text, save_text, time_left
from muster.service.formatting.rounds import rounds_of
from muster.service.formatting.save_groups import SAVE_GROUPS
from muster.service.insight import words as insight_words
from muster.service.local_wire import list_response
from muster.service.version import VERSION
from muster.service.web import links
from muster.service.web.page_data import Overview, RunData, count_fully_named
from muster.service.web.rankmap import RankMap, rank_map
from muster.service.web.stacks import StacksData
from muster.service.wire import milliseconds, rendezvous_to_pb, save_to_pb, timestamp_to_pb
from muster.v1 import coordinator_pb2, insight_pb2

FOLDED_ABOVE = 16
"""A longer list of hosts, and the stacks of further crowds, are folded until a viewer opens them."""
HURRY = 0.2
"""A barrier with less than this part of its timeout left is highlighted."""
STATES = {
    MemberState.CONNECTED: "connected",
    MemberState.IDLE: "idle",
    MemberState.DISCONNECTED: "disconnected",
    MemberState.LOST: "lost",
    MemberState.LEFT: "left",
    MemberState.EVICTED: "evicted",
}
"""States of processes. The first one that applies counts for a rank with several processes."""
NEVER_JOINED = "never joined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """The missing ranks of a barrier that have the same state."""

    id: str
    """The id of the HTML element, the same at every reload."""
    state: str
    words: str
    ranks: str
    count: int
    hosts: int
    rows: Sequence[report.MissingOfHost]

    @property
    def open(self) -> bool:
        """Whether the rows are unfolded at first."""
        return len(self.rows) <= FOLDED_ABOVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An open barrier."""

    view: barrier_views.BarrierView
    hurry: bool
    few: bool
    """Whether the missing ranks are named one by one."""
    missing: Sequence[Missing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decided barrier."""

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
    """Hosts with all processes connected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTier:
    """The local checkpoints and the keepers of a run."""

    checkpoints: Sequence[CheckpointRow]
    """Newest first."""
    newest: dict[str, CheckpointRow]
    """The newest one of at least each level, by the name of the level."""
    keepers: Sequence[KeeperRow]
    connected: int
    """Keepers that are connected."""
    recovery: str
    """The last decision on what to resume from, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """Processes at the same place, or without an answer for the same reason."""

    who: str
    line: str
    facts: str
    """What a single process reports besides its threads."""
    threads: Sequence[insight_pb2.Thread]
    """The main one first."""
    threads_left_out: int
    open: bool
    """Whether its main thread is unfolded at first."""


def visible(value: object) -> object:
    """Return a value for a template, with visible control characters if it is text from outside."""
    if not isinstance(value, str) or hasattr(value, "__html__") or value.isprintable():
        return value
    return report.printable(value).replace("\n", "\\n")


def _duration(seconds: float) -> str:
    return cells.duration(milliseconds(seconds))


def _moment(wall: float) -> str:
    """Format a time in UTC, to the second."""
    return str(timestamp_to_pb(round(wall)).ToJsonString())


def _to_the_second(moment: str) -> str:
    """Cut the microseconds from a time of the wire."""
    return re.sub(r"\.\d+Z$", "Z", moment)


def _ago(then: float, now: float) -> str:
    return _duration(max(0.0, now - then))


def _in_order(numbers: Iterable[int]) -> str:
    """Fold numbers into ranges without sorting them: they are the process ids of ranks."""
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
        run_json=links.run_json,
        stacks_page=links.stacks_page,
        stacks_json=links.stacks_json,
        saves=SAVE_GROUPS,
        command=report.command,
        steps=cells.steps,
        nothing="–",
        version=VERSION,
    )
    return environment


_TEMPLATES = _environment()


def overview_page(overview: Overview, root: str) -> str:
    """Render the page of all runs.

    Args:
        overview: the data.
        root: the relative path from the page to the root of the site.
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
    """Render the page of a replica that does not lead.

    Args:
        address: the address of this replica.
        leader: the address of the leader; empty if no replica leads.
        replicas: all known replicas.
        trouble: why this replica could not take over now; empty if it could.
    """
    return _TEMPLATES.get_template("standby.html").render(
        root="", address=address, leader=leader, replicas=replicas, trouble=trouble
    )


def run_page(data: RunData, root: str) -> str:
    """Render the page of one run. See :func:`overview_page`."""
    return _TEMPLATES.get_template("run.html").render(
        root=root,
        data=data,
        run=data.run,
        waiting=[_waiting(view) for view in data.waiting],
        more_waiting=data.run.open_barriers - len(data.waiting),
        decided=[
            _decided(view, in_full=index < count_fully_named(data.decided))
            for index, view in enumerate(data.decided)
        ],
        local=_local(data),
        members=_members(data),
        rendezvous=data.rendezvous,
        rounds=rounds_of(rendezvous_to_pb(data.rendezvous)),
        save=_save(data.run.save, data.taken_at) if data.run.save is not None else "",
        standstill=_standstill(data),
    )


def _local(data: RunData) -> LocalTier | None:
    if data.local is None:
        return None
    found = list_response(data.local)
    checkpoints = checkpoint_rows(found)
    return LocalTier(
        checkpoints=checkpoints,
        newest=newest_of_levels(checkpoints),
        keepers=keeper_rows(found),
        connected=sum(one.connected for one in found.keepers),
        recovery=found.recovery,
    )


def _standstill(data: RunData) -> str:
    """Name the last rank in training, and how long ago any rank moved; empty if no rank reports steps."""
    steps = data.run.steps
    if steps is None or data.still is None:
        return ""
    return cells.standstill(steps.lowest, steps.highest, steps.lowest_rank, data.still)


def _save(save: Save, now: float) -> str:
    """Describe the newest requested save. ``now``: seconds since 1970."""
    shown = save_to_pb(save)
    left = time_left(shown, now)
    late = f". At its deadline, the {shown.late}" if shown.late else ""
    return f"{save_text(shown)}{f'; {left}' if left else ''} (asked for by {asked_text(shown)}){late}"


def stacks_page(data: StacksData, root: str) -> str:
    """Render the page of stacks. See :func:`overview_page`."""
    response = data.response
    return _TEMPLATES.get_template("stacks.html").render(
        root=root,
        data=data,
        query=data.query,
        crowds=[
            _crowd(crowd, insight_words.crowd(crowd.members), open=at < FOLDED_ABOVE)
            for at, crowd in enumerate(response.crowds)
        ],
        silent=[_crowd(crowd, insight_words.singly(crowd.members), open=False) for crowd in response.silent],
    )


def refusal_page(refusal: Refusal, root: str, *, renews: bool = True) -> str:
    """Render the page that says why something cannot be shown.

    Args:
        refusal: the reason.
        root: see :func:`overview_page`.
        renews: whether the page reloads itself until there is something to show.
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
    """Group the missing ranks by state: gone ranks first, then those that have not arrived."""
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
    """Describe a decision; with ``in_full`` it names all missing ranks."""
    name = report.printable(report.barrier_name(view.run_id, view.prefix, view.sequence))
    headline, *more = view.message.split("\n")
    return Decided(
        view=view,
        outcome=view.decision.outcome.name if view.decision is not None else "",
        why=headline.removeprefix(name).strip(),
        more=more if in_full else (),
    )


def _members(data: RunData) -> Members:
    standing: dict[int, str] = {}
    preference = list(STATES)
    for host in sorted(data.hosts, key=lambda host: preference.index(host.state)):
        for rank in host.ranks:
            standing.setdefault(rank, STATES[host.state])
    for view in data.waiting:
        for one in view.missing:
            if one.state is MissingState.NEVER_JOINED:
                standing.setdefault(one.rank, NEVER_JOINED)
    ranks: dict[str, list[int]] = {}
    for rank, words in standing.items():
        ranks.setdefault(words, []).append(rank)
    return Members(
        map=rank_map(ranks),
        counts={words: len(ranks[words]) for words in [*STATES.values(), NEVER_JOINED] if words in ranks},
        trouble=[host for host in data.hosts if host.state is not MemberState.CONNECTED],
        well=[host for host in data.hosts if host.state is MemberState.CONNECTED],
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
            if thread.frames or thread.frames_left_out  # The line says if the main thread has ended.
        ],
        threads_left_out=alone.threads_left_out if alone is not None else 0,
        open=open,
    )


def _id(*parts: object) -> str:
    """Return an id for an HTML element that no data from outside can choose."""
    return "m" + hashlib.blake2s(repr(parts).encode(), digest_size=8).hexdigest()
