"""Why a process of a run is refused, and a request that concerns its processes."""

from collections.abc import Iterable

from muster.service.core.membership.process import Process
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.events import ProcessInfo
from muster.service.core.vocabulary.refusal import Reason, Refusal


def stale_generation(run_id: str, generation: int, newest: int) -> Refusal:
    """Return the refusal for an older generation: invariant 11 (the newer fences the older)."""
    return Refusal(
        Reason.STALE_GENERATION,
        f"generation {generation} of run {run_id} is over: generation {newest} has "
        "started. This process belongs to a past life of the job; end it.",
        generation=newest,
    )


def evicted(run_id: str, generation: int, info: ProcessInfo) -> Refusal:
    """Return the refusal for a process that was evicted."""
    return Refusal(
        Reason.EVICTED,
        f"{report.process_name(info.rank, info.host, info.pid)} was evicted from run {run_id}, "
        f"generation {generation}. End this process; a new one of the rank may come.",
    )


def member_not_found(run_id: str, rank: int, roster: Iterable[Process]) -> Refusal:
    """Return the refusal to evict a rank that has no process."""
    return Refusal(
        Reason.MEMBER_NOT_FOUND,
        f"rank {rank} of run {run_id} has no process that could be evicted; there are "
        f"{report.ranges(p.rank for p in roster if not p.state.gone) or 'none'}. "
        f"List them with: {report.command('get members', run_id)}",
    )


def group_not_found(run_id: str, prefix: str, groups: Iterable[str]) -> Refusal:
    """Return the refusal for a group that the run does not have."""
    known = ", ".join(f'"{name}"' for name in sorted(groups)[:10]) or "none yet"
    return Refusal(
        Reason.BARRIER_NOT_FOUND,
        f'run {run_id} has no group "{report.shown(prefix)}"; it has {known}.',
    )


def ranks_reconnect(node_name: str, left: float) -> Refusal:
    """Return the refusal of a drain that found nothing on a node shortly after the coordinator started."""
    return Refusal(
        Reason.RANKS_RECONNECT,
        f"this coordinator has just started, and nothing on node {report.shown(node_name)} has connected to "
        "it yet, so it is unknown which runs are there. Nothing was asked for. Repeat it in "
        f"{report.seconds(left)}.",
    )


def no_members(run_id: str) -> Refusal:
    """Return the refusal of a request for a save that no process could hear."""
    return Refusal(
        Reason.NO_MEMBERS,
        f"run {run_id} has no connected process and no node, so nobody could save. Nothing was asked for. "
        f"Look at it with: {report.command('describe run', run_id)}",
    )
