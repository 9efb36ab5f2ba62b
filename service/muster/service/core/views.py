"""What people may see of the state: frozen pictures, made on demand."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

from muster.service.core.barriers.group import Group
from muster.service.core.coordinator import Coordinator
from muster.service.core.membership.process import Process
from muster.service.core.rendezvous import Departed
from muster.service.core.run import Run
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.effects import RoundRecord
from muster.service.core.vocabulary.model import (
    CheckpointHistory,
    Closed,
    Decision,
    Instant,
    MemberState,
    MissingRank,
    NodeInfo,
    NodeStanding,
    RendezvousSettings,
    Save,
    Step,
)
from muster.service.core.vocabulary.refusal import Reason, Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierView:
    """One barrier; open while it has no decision."""

    run_id: str
    prefix: str
    sequence: int
    generation: int
    arrived: int
    required: int
    age: float
    """Seconds since the first arrival; 0 when decided."""
    remaining: float
    """Seconds until it times out; 0 when decided."""
    missing: tuple[MissingRank, ...]
    decision: Decision | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberView:
    """One process."""

    rank: int
    incarnation: str
    ordinal: int
    host: str
    pid: int
    state: MemberState
    since: float
    """Seconds that it has stood so."""
    generation: int
    node_rank: int | None
    relay: str
    """Through which it speaks, or spoke last; empty: it has a stream of its own."""
    groups: tuple[tuple[str, int | None], ...]
    """(prefix, last sequence that it arrived at)."""
    step: int | None
    """The training step that it is at; None: it never told."""
    step_age: float
    """Seconds that it has been there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """The ranks of one host whose processes stand alike."""

    host: str
    node_rank: int | None
    relay: str
    """Through which they speak, or spoke last; empty: each has a stream of its own."""
    state: MemberState
    ranks: tuple[int, ...]
    """Ascending."""
    steps: tuple[int, int] | None
    """The lowest and the highest training step of those that tell theirs; None: none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsView:
    """How far the ranks of a run have come in their training, of those that are there and tell it."""

    highest: int
    lowest: int
    lowest_rank: int
    """Of the ranks at the lowest step, the one that has been there for the longest time."""
    moved_at: float
    """When one of them moved last, on the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsView:
    """The save history of a run."""

    history: CheckpointHistory
    age: float
    """Seconds since the newest checkpoint was committed; 0 if there is none."""
    unsaved: float | None
    """Seconds that ranks have been connected without a commit; None: no rank is, or nothing was committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """One run, counted."""

    run_id: str
    generation: int
    connected: int
    members: int
    groups: int
    open_barriers: int
    decided_barriers: int
    round: int | None
    """None: no node has ever joined."""
    nodes: int
    nodes_waiting: int
    store_keys: int
    store_bytes: int
    closed: Closed | None
    steps: StepsView | None
    """None: no rank that is there tells its step."""
    save: Save | None
    """The one that was asked for last."""
    checkpoints: CheckpointsView | None
    """None: its ranks reported no save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageView:
    """How much of a bound of the whole coordinator is used."""

    limit: str
    """The name of the bound."""
    used: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node that has a place in a rendezvous."""

    info: NodeInfo
    standing: NodeStanding
    rank: int | None
    connected: bool
    since: float
    """Seconds that it has been connected, or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousView:
    """The rendezvous of a run."""

    run_id: str
    round: int
    complete: bool
    settings: RendezvousSettings | None
    nodes: tuple[NodeView, ...]
    departed: tuple[Departed, ...]
    now: float
    """Of the monotonic clock, that the departures are on."""
    rounds: tuple[RoundRecord, ...]
    """Newest first."""
    closed: Closed | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingView:
    """Whom the closing of a run affects."""

    waiting_nodes: tuple[NodeInfo, ...]
    nodes_in_round: int
    connected_processes: int
    open_barriers: tuple[tuple[str, int], ...]
    """(prefix, sequence)."""
    closed: Closed | None
    """How it was closed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionView:
    """Whom an eviction affects."""

    members: tuple[MemberView, ...]
    failed_barriers: tuple[tuple[str, int], ...]
    """(prefix, sequence)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalView:
    """Whom the removal of a run affects."""

    processes: int
    """Those that are connected, and those that may come back."""
    nodes: int
    """Those that have a place in its rendezvous."""
    open_barriers: tuple[tuple[str, int], ...]
    """(prefix, sequence)."""
    waiting_calls: int
    """For keys of its store."""


def runs(
    coordinator: Coordinator, now: Instant, shown: Callable[[str], bool] = lambda _: True
) -> list[RunView]:
    """The runs that are shown, by id; no view is made of the others."""
    return [run(coordinator.runs[run_id], now) for run_id in sorted(coordinator.runs) if shown(run_id)]


def run(run: Run, now: Instant) -> RunView:
    """One run."""
    groups = run.groups.values()
    connected = {p.rank for p in run.roster if p.state is MemberState.CONNECTED}
    return RunView(
        run_id=run.run_id,
        generation=run.generation,
        connected=len(connected),
        members=len(run.roster),
        groups=len(groups),
        open_barriers=sum(group.open is not None for group in groups),
        decided_barriers=sum(group.next_sequence for group in groups),
        round=run.rendezvous.round if run.rendezvous.settings is not None else None,
        nodes=run.rendezvous.count(NodeStanding.PARTICIPANT),
        nodes_waiting=run.rendezvous.count(NodeStanding.WAITING),
        store_keys=len(run.store.values),
        store_bytes=run.store.bytes,
        closed=run.closed,
        steps=steps(run),
        save=run.saving.save,
        checkpoints=checkpoints(run, now),
    )


def checkpoints(run: Run, now: Instant) -> CheckpointsView | None:
    """Return the save history of a run; None if its ranks reported no save."""
    history = run.checkpoints.history
    if history.newest is None:
        return CheckpointsView(history=history, age=0.0, unsaved=None) if history.failures else None
    age = max(0.0, now.wall - history.newest.committed_at)
    since = min((p.since for p in run.roster if p.state is MemberState.CONNECTED), default=None)
    unsaved = min(age, now.monotonic - since) if since is not None else None
    return CheckpointsView(history=history, age=age, unsaved=unsaved)


def steps(run: Run) -> StepsView | None:
    """How far the connected ranks of a run have come; None: none of them tells."""
    told = [
        (process.step, process.rank)
        for process in run.roster
        if process.step is not None and process.state is MemberState.CONNECTED
    ]
    if not told:
        return None
    last, lowest_rank = min(told)
    return StepsView(
        highest=max(step.number for step, _ in told),
        lowest=last.number,
        lowest_rank=lowest_rank,
        moved_at=max(step.since for step, _ in told),
    )


def usage(coordinator: Coordinator, now: Instant) -> list[UsageView]:
    """What is used of the bounds that all runs share."""
    limits = coordinator.limits
    # A finished run makes room for a new one.
    runs = sum(not coordinator.reaper.is_reclaimable(run, now) for run in coordinator.runs.values())
    sessions = len(coordinator.sessions) + len(coordinator.node_streams)
    return [
        UsageView(limit="max_runs", used=runs, most=limits.max_runs),
        UsageView(limit="max_sessions", used=sessions, most=limits.max_sessions),
        UsageView(
            limit="max_relayed_processes",
            used=coordinator.sessions.relayed,
            most=limits.max_relayed_processes,
        ),
        UsageView(
            limit="max_total_store_bytes",
            used=coordinator.stored.bytes,
            most=limits.max_total_store_bytes,
        ),
        UsageView(
            limit="max_total_gather_bytes",
            used=coordinator.gathered.bytes,
            most=limits.max_total_gather_bytes,
        ),
    ]


def members(run: Run, now: Instant) -> list[MemberView]:
    """The processes of a run, by rank and ordinal."""
    return [_member(run, process, now) for process in run.roster]


def hosts(run: Run) -> list[HostView]:
    """The processes of a run folded by host, node, relay and state, in the order of their first rank."""
    folded: dict[tuple[str, int | None, str, MemberState], dict[int, Step | None]] = {}
    for process in run.roster:
        key = process.host, process.node_rank, process.relay, process.state
        ranks = folded.get(key)
        if ranks is None:
            ranks = folded[key] = {}
        ranks[process.rank] = process.step
    return [
        HostView(
            host=host,
            node_rank=node_rank,
            relay=relay,
            state=state,
            ranks=tuple(ranks),
            steps=_span(step.number for step in ranks.values() if step is not None),
        )
        for (host, node_rank, relay, state), ranks in folded.items()
    ]


def _span(numbers: Iterable[int]) -> tuple[int, int] | None:
    known = list(numbers)
    return (min(known), max(known)) if known else None


def _member(run: Run, process: Process, now: Instant) -> MemberView:
    prefixes = sorted(process.prefixes)
    return MemberView(
        rank=process.rank,
        incarnation=process.incarnation,
        ordinal=process.ordinal,
        host=process.host,
        pid=process.pid,
        state=process.state,
        since=now.monotonic - process.since,
        generation=process.generation,
        node_rank=process.node_rank,
        relay=process.relay,
        groups=tuple((prefix, run.groups[prefix].owners[process.rank].last) for prefix in prefixes),
        step=process.step.number if process.step is not None else None,
        step_age=now.monotonic - process.step.since if process.step is not None else 0.0,
    )


def rendezvous(run: Run, now: Instant) -> RendezvousView:
    """The rendezvous of a run."""
    state = run.rendezvous
    nodes = sorted(
        state, key=lambda node: (node.standing, -1 if node.rank is None else node.rank, node.arrival)
    )
    return RendezvousView(
        run_id=run.run_id,
        round=state.round,
        complete=state.complete,
        settings=state.settings,
        nodes=tuple(
            NodeView(
                info=node.info,
                standing=node.standing,
                rank=node.rank,
                connected=node.session is not None,
                since=now.monotonic - node.since,
            )
            for node in nodes
        ),
        departed=tuple(state.departed),
        now=now.monotonic,
        rounds=tuple(reversed(state.rounds)),
        closed=run.closed,
        message=report.run_closed(run.run_id, run.closed) if run.closed is not None else state.message(),
    )


def closing(coordinator: Coordinator, run_id: str, *, create: bool = False) -> ClosingView:
    """Whom the closing of a run affects; nobody, if it is to be created for that.

    Raises:
        Refusal: RUN_NOT_FOUND.
    """
    if create and run_id not in coordinator.runs:
        return ClosingView(
            waiting_nodes=(), nodes_in_round=0, connected_processes=0, open_barriers=(), closed=None
        )
    run = coordinator.run(run_id)
    state = run.rendezvous
    waiting = state.of(NodeStanding.WAITING) + state.of(NodeStanding.REDUNDANT)
    if not state.complete:
        waiting += state.of(NodeStanding.PARTICIPANT)
    return ClosingView(
        waiting_nodes=tuple(node.info for node in waiting),
        nodes_in_round=state.count(NodeStanding.PARTICIPANT) if state.complete else 0,
        connected_processes=sum(process.state is MemberState.CONNECTED for process in run.roster),
        open_barriers=_open_barriers(run),
        closed=run.closed,
    )


def _open_barriers(run: Run) -> tuple[tuple[str, int], ...]:
    groups = sorted(run.groups.items())
    return tuple((prefix, group.open.sequence) for prefix, group in groups if group.open is not None)


def removal(coordinator: Coordinator, run_id: str, now: Instant, *, force: bool) -> RemovalView:
    """Whom the removal of a run affects.

    Raises:
        Refusal: RUN_NOT_FOUND; or RUN_IN_USE, unless it is to be forced.
    """
    run = coordinator.run(run_id)
    if not force:
        coordinator.reaper.check_unused(run, now)
    return RemovalView(
        processes=sum(process.state.living for process in run.roster),
        nodes=len(run.rendezvous),
        open_barriers=_open_barriers(run),
        waiting_calls=len(run.store.waiters),
    )


def eviction(run: Run, rank: int, now: Instant) -> EvictionView:
    """Whom the eviction of a rank affects.

    Raises:
        Refusal: MEMBER_NOT_FOUND.
    """
    return EvictionView(
        members=tuple(_member(run, process, now) for process in run.find_evictable(rank)),
        failed_barriers=tuple(
            (prefix, group.open.sequence)
            for prefix, group in sorted(run.groups.items())
            if group.open is not None and rank in group.open.shape and rank not in group.open.arrivals
        ),
    )


def open_barrier(group: Group, now: Instant) -> BarrierView | None:
    """The group's open barrier, if there is one."""
    barrier = group.open
    if barrier is None:
        return None
    progress = group.progress(barrier, now)
    return BarrierView(
        run_id=group.run_id,
        prefix=group.prefix,
        sequence=barrier.sequence,
        generation=group.generation,
        arrived=progress.arrived,
        required=progress.required,
        age=now.monotonic - barrier.opened_at,
        remaining=max(0.0, barrier.deadline - now.monotonic),
        missing=progress.missing,
        decision=None,
        message=progress.message,
    )


def decided_barrier(decision: Decision) -> BarrierView:
    """A barrier that is over."""
    return BarrierView(
        run_id=decision.run_id,
        prefix=decision.prefix,
        sequence=decision.sequence,
        generation=decision.generation,
        arrived=decision.arrived,
        required=decision.required,
        age=0.0,
        remaining=0.0,
        missing=decision.missing,
        decision=decision,
        message=decision.message,
    )


def barrier(
    coordinator: Coordinator, run_id: str, prefix: str, sequence: int | None, now: Instant
) -> BarrierView:
    """One barrier; without a sequence the open one, or else the last one decided.

    Raises:
        Refusal: RUN_NOT_FOUND or BARRIER_NOT_FOUND.
    """
    group = coordinator.group(run_id, prefix)
    view = open_barrier(group, now)
    if sequence is None:
        sequence = group.next_sequence if view is not None else group.next_sequence - 1
    if view is not None and view.sequence == sequence:
        return view
    decision = group.decisions.get(sequence)
    if decision is None:
        name = report.barrier_name(run_id, prefix, sequence)
        kept = f"kept are #{report.ranges(group.decisions)}" if group.decisions else "none is decided"
        raise Refusal(
            Reason.BARRIER_NOT_FOUND,
            f"{name} is not known: {kept}, and the next is #{group.next_sequence}.",
        )
    return decided_barrier(decision)


def barriers(
    coordinator: Coordinator,
    run_id: str,
    history: int,
    now: Instant,
    shown: Callable[[str], bool] = lambda _: True,
) -> Iterator[BarrierView]:
    """The open barrier and the newest ``history`` decided ones of every group.

    Args:
        coordinator: where they are.
        run_id: of which run; empty: of all that are shown.
        history: how many decisions of each group.
        now: this moment.
        shown: whether a run is.

    Raises:
        Refusal: RUN_NOT_FOUND.
    """
    runs = sorted(coordinator.runs.items())
    chosen = [coordinator.run(run_id)] if run_id else [run for name, run in runs if shown(name)]
    for run in chosen:
        for _, group in sorted(run.groups.items()):
            view = open_barrier(group, now)
            if view is not None:
                yield view
            newest = sorted(group.decisions, reverse=True)[:history]
            yield from (decided_barrier(group.decisions[sequence]) for sequence in newest)


def longest_open(groups: Iterable[Group], now: Instant, *, most: int, most_missing: int) -> list[BarrierView]:
    """The barriers that have been open longest, that one first.

    Args:
        groups: where to look.
        now: this moment.
        most: how many barriers to show.
        most_missing: how many missing ranks to name in all of them together, since that is what takes time;
            one barrier is shown in any case.
    """
    waiting = sorted(
        ((group.open, group) for group in groups if group.open is not None),
        key=lambda pair: pair[0].opened_at,
    )
    shown: list[BarrierView] = []
    for barrier, group in waiting[:most]:
        most_missing -= barrier.shape.size - len(barrier.arrivals)
        if shown and most_missing < 0:
            break
        view = open_barrier(group, now)
        if view is not None:
            shown.append(view)
    return shown


def last_decided(groups: Iterable[Group], most: int) -> list[BarrierView]:
    """The newest ``most`` decisions, newest first."""
    # A group's decisions ascend, so the newest of all are in the groups that decided last.
    decided = (group for group in groups if group.decisions)
    latest = nlargest(most, decided, key=lambda group: next(reversed(group.decisions.values())).decided_at)
    newest = [one for group in latest for one in islice(reversed(group.decisions.values()), most)]
    return [decided_barrier(one) for one in nlargest(most, newest, key=lambda one: one.decided_at)]
