"""What the status page and its twins show: one look at the state each, made on the loop, so kept small."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from muster.service.core import barrier_views, views
from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.model import Instant
from muster.service.security.grants import Grant
from muster.service.snapshots import ALL, Snapshots
from muster.v1 import coordinator_pb2

MOST_WAITING = 100
"""Open barriers on one page, those first that have been open longest."""
MOST_MISSING = 16_384
"""Missing ranks that all barriers of one page name; a barrier alone may have more."""
MOST_DECIDED = 20
"""Decisions on one page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All runs."""

    taken_at: float
    """Seconds since 1970."""
    epoch: int
    only: tuple[str, ...]
    """The patterns of the runs that are shown; empty: all are."""
    runs: tuple[views.RunView, ...]
    waiting: tuple[barrier_views.BarrierView, ...]
    decided: tuple[barrier_views.BarrierView, ...]
    replicas: tuple[coordinator_pb2.Replica, ...] = ()
    """All coordinators of this state; empty if there can be only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLook:
    """One run."""

    taken_at: float
    """Seconds since 1970."""
    run: views.RunView
    rendezvous: views.RendezvousView
    waiting: tuple[barrier_views.BarrierView, ...]
    decided: tuple[barrier_views.BarrierView, ...]
    still: float | None
    """Seconds since one of its ranks took a training step; None: none tells."""
    hosts: tuple[views.HostView, ...] = ()
    members: tuple[views.MemberView, ...] = ()


def overview(
    coordinator: Coordinator, now: Instant, snapshots: Snapshots, grant: Grant | None = None
) -> Overview:
    """Look at all runs.

    Args:
        coordinator: where they are.
        now: this moment.
        snapshots: makes the views of the runs.
        grant: whose runs alone are shown; None: all are.
    """
    runs = [run for run in coordinator.runs.values() if grant is None or grant.allows(run.run_id)]
    groups = [group for run in runs for group in run.groups.values()]
    taken = snapshots.take(coordinator, now, ALL if grant is None else grant.runs)
    return Overview(
        taken_at=now.wall,
        epoch=coordinator.epoch,
        only=() if grant is None else grant.runs,
        runs=tuple(one.view for one in taken.runs),
        waiting=tuple(barrier_views.longest_open(groups, now, most=MOST_WAITING, most_missing=MOST_MISSING)),
        decided=tuple(barrier_views.last_decided(groups, MOST_DECIDED)),
    )


def run(coordinator: Coordinator, run_id: str, now: Instant, *, singly: bool) -> RunLook:
    """Look at one run.

    Args:
        coordinator: where it is.
        run_id: its id.
        now: this moment.
        singly: whether to show its processes one by one, rather than host by host.

    Raises:
        Refusal: RUN_NOT_FOUND.
    """
    found = coordinator.run(run_id)
    groups = found.groups.values()
    view = views.run(found, now)
    return RunLook(
        taken_at=now.wall,
        run=view,
        still=now.monotonic - view.steps.moved_at if view.steps is not None else None,
        rendezvous=views.rendezvous(found, now),
        waiting=tuple(barrier_views.longest_open(groups, now, most=MOST_WAITING, most_missing=MOST_MISSING)),
        decided=tuple(barrier_views.last_decided(groups, MOST_DECIDED)),
        hosts=() if singly else tuple(views.hosts(found)),
        members=tuple(views.members(found, now)) if singly else (),
    )


def named(decided: Iterable[barrier_views.BarrierView]) -> int:
    """Of how many decisions, newest first, all who were missing may be named; of one in any case."""
    return max(1, sum(count <= MOST_MISSING for count in accumulate(len(view.missing) for view in decided)))
