"""What people may see of runs: immutable views, made when somebody asks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from muster.service.core.coordinator import Coordinator
from muster.service.core.membership.process import Process
from muster.service.core.node_eviction import plan_eviction
from muster.service.core.rendezvous import reports
from muster.service.core.rendezvous.nodes import Departed, Node
from muster.service.core.run import Run
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.model import (
    CheckpointHistory,
    Closed,
    Instant,
    MemberState,
    NodeInfo,
    NodeStanding,
    RendezvousSettings,
    Save,
    Step,
    Stopped,
)
from muster.service.core.vocabulary.records import RoundRecord


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
    """Seconds since it entered its state."""
    generation: int
    node_rank: int | None
    node_name: str
    """The name of its node as the scheduler knows it."""
    relay: str
    """The relay of its session, or of its last one; empty: a stream of its own."""
    groups: tuple[tuple[str, int | None], ...]
    """(prefix, last sequence that it arrived at)."""
    step: int | None
    """The training step that it last reported; None: it reported none."""
    step_age: float
    """Seconds since it reported that step first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """The ranks of one host with the same state."""

    host: str
    node_rank: int | None
    relay: str
    """The relay of their sessions, or of their last ones; empty: streams of their own."""
    state: MemberState
    ranks: tuple[int, ...]
    """Ascending."""
    steps: tuple[int, int] | None
    """The lowest and the highest reported training step; None: no rank reported one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsView:
    """The training steps of a run's connected ranks that report them."""

    highest: int
    lowest: int
    lowest_rank: int
    """The rank that has been at the lowest step for longest."""
    moved_at: float
    """When a rank last reported a new step, on the monotonic clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsView:
    """The save history of a run."""

    history: CheckpointHistory
    age: float
    """Seconds since the newest checkpoint was committed; 0 without a checkpoint."""
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
    stopped: Stopped | None
    steps: StepsView | None
    """None: no connected rank reports its step."""
    save: Save | None
    """The newest request."""
    checkpoints: CheckpointsView | None
    """None: its ranks reported no save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageView:
    """How much of one of the coordinator's bounds is used."""

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
    """The time of the view, on the monotonic clock of the departures."""
    rounds: tuple[RoundRecord, ...]
    """Newest first."""
    closed: Closed | None
    stopped: Stopped | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingView:
    """What the closing of a run affects."""

    waiting_nodes: tuple[NodeInfo, ...]
    nodes_in_round: int
    connected_processes: int
    open_barriers: tuple[tuple[str, int], ...]
    """(prefix, sequence)."""
    closed: Closed | None
    """How it was closed before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionView:
    """What an eviction affects."""

    members: tuple[MemberView, ...]
    failed_barriers: tuple[tuple[str, int], ...]
    """(prefix, sequence)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvictionView:
    """What the eviction of a machine affects."""

    nodes: tuple[NodeView, ...]
    """Its agents."""
    spares: int
    """Connected nodes of other machines that stand by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovalView:
    """What the removal of a run affects."""

    processes: int
    """Processes that are connected or may come back."""
    nodes: int
    """Nodes with a place in its rendezvous."""
    open_barriers: tuple[tuple[str, int], ...]
    """(prefix, sequence)."""
    waiting_calls: int
    """Calls that wait for keys of its store."""


def runs(
    coordinator: Coordinator, now: Instant, shown: Callable[[str], bool] = lambda _: True
) -> list[RunView]:
    """Return the runs that ``shown`` selects, by id."""
    return [run(coordinator.runs[run_id], now) for run_id in sorted(coordinator.runs) if shown(run_id)]


def run(run: Run, now: Instant) -> RunView:
    """Return one run."""
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
        stopped=run.stopping.stopped,
        steps=steps(run),
        save=run.saving.save,
        checkpoints=checkpoints(run, now),
    )


def runs_on_node(core: Coordinator, node_name: str, shows: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the ids of the runs that have a process or an agent on a node, in order.

    Args:
        core: the coordinator.
        node_name: the name of the node as the scheduler knows it.
        shows: whether the caller may touch a run.
    """
    return tuple(
        sorted(run.run_id for run in core.runs.values() if run.is_on_node(node_name) and shows(run.run_id))
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
    """Return the steps of a run's connected ranks; None if none of them reports one."""
    reported = [
        (process.step, process.rank)
        for process in run.roster
        if process.step is not None and process.state is MemberState.CONNECTED
    ]
    if not reported:
        return None
    last, lowest_rank = min(reported)
    return StepsView(
        highest=max(step.number for step, _ in reported),
        lowest=last.number,
        lowest_rank=lowest_rank,
        moved_at=max(step.since for step, _ in reported),
    )


def usage(coordinator: Coordinator, now: Instant) -> list[UsageView]:
    """Return how much is used of the bounds that all runs share."""
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
    """Return the processes of a run, by rank and ordinal."""
    return [_member(run, process, now) for process in run.roster]


def hosts(run: Run) -> list[HostView]:
    """Return the processes of a run grouped by host, node, relay and state, by their first rank."""
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
        node_name=process.node_name,
        relay=process.relay,
        groups=tuple((prefix, run.groups[prefix].owners[process.rank].last) for prefix in prefixes),
        step=process.step.number if process.step is not None else None,
        step_age=now.monotonic - process.step.since if process.step is not None else 0.0,
    )


def rendezvous(run: Run, now: Instant) -> RendezvousView:
    """Return the rendezvous of a run."""
    state = run.rendezvous
    nodes = sorted(
        state, key=lambda node: (node.standing, -1 if node.rank is None else node.rank, node.arrival)
    )
    return RendezvousView(
        run_id=run.run_id,
        round=state.round,
        complete=state.complete,
        settings=state.settings,
        nodes=tuple(_node(node, now) for node in nodes),
        departed=tuple(state.departed),
        now=now.monotonic,
        rounds=tuple(reversed(state.rounds)),
        closed=run.closed,
        stopped=run.stopping.stopped,
        message=report.run_closed(run.run_id, run.closed) if run.closed is not None else reports.state(state),
    )


def _node(node: Node, now: Instant) -> NodeView:
    return NodeView(
        info=node.info,
        standing=node.standing,
        rank=node.rank,
        connected=node.session is not None,
        since=now.monotonic - node.since,
    )


def node_eviction(run: Run, node_name: str, now: Instant, *, only_if_spare: bool) -> NodeEvictionView:
    """Return what the eviction of a machine affects.

    Raises:
        Refusal: as :func:`plan_eviction`.
    """
    planned = plan_eviction(run, node_name, only_if_spare=only_if_spare)
    return NodeEvictionView(nodes=tuple(_node(one, now) for one in planned.nodes), spares=planned.spares)


def closing(coordinator: Coordinator, run_id: str, *, create: bool = False) -> ClosingView:
    """Return what the closing of a run affects. An unknown run with ``create`` affects nothing.

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
    """Return what the removal of a run affects.

    Raises:
        Refusal: RUN_NOT_FOUND; or RUN_IN_USE without ``force``.
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
    """Return what the eviction of a rank affects.

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
