"""The data of each page and JSON view, read from the state on the event loop, so it is kept small."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from muster.service.core import barrier_views, views
from muster.service.core.coordinator import Coordinator
from muster.service.core.local.views import LocalTierView, local_tier
from muster.service.core.vocabulary.model import Instant
from muster.service.security.grants import Grant
from muster.service.snapshots import ALL, Snapshots
from muster.v1 import coordinator_pb2

MAX_WAITING = 100
"""Open barriers on one page, the oldest first."""
MAX_MISSING = 16_384
"""Missing ranks that all barriers of one page name; a single barrier may name more."""
MAX_DECIDED = 20
"""Decisions on one page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The data of the page of all runs."""

    taken_at: float
    """Seconds since 1970."""
    epoch: int
    only: tuple[str, ...]
    """The patterns of the runs that are shown; empty: all runs."""
    runs: tuple[views.RunView, ...]
    waiting: tuple[barrier_views.BarrierView, ...]
    decided: tuple[barrier_views.BarrierView, ...]
    replicas: tuple[coordinator_pb2.Replica, ...] = ()
    """All coordinators of this state; empty if there can be only one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """The data of the page of one run."""

    taken_at: float
    """Seconds since 1970."""
    run: views.RunView
    rendezvous: views.RendezvousView
    waiting: tuple[barrier_views.BarrierView, ...]
    decided: tuple[barrier_views.BarrierView, ...]
    still: float | None
    """Seconds since one of its ranks took a training step; None if no rank reports steps."""
    local: LocalTierView | None = None
    """Its local checkpoints and keepers; None: it has none."""
    hosts: tuple[views.HostView, ...] = ()
    members: tuple[views.MemberView, ...] = ()


def take_overview(
    coordinator: Coordinator, now: Instant, snapshots: Snapshots, grant: Grant | None = None
) -> Overview:
    """Read all runs.

    Args:
        coordinator: the state.
        now: the current time.
        snapshots: makes the views of the runs.
        grant: restricts the runs that are shown; None: all runs.
    """
    runs = [run for run in coordinator.runs.values() if grant is None or grant.allows(run.run_id)]
    groups = [group for run in runs for group in run.groups.values()]
    taken = snapshots.take(coordinator, now, ALL if grant is None else grant.runs)
    return Overview(
        taken_at=now.wall,
        epoch=coordinator.epoch,
        only=() if grant is None else grant.runs,
        runs=tuple(one.view for one in taken.runs),
        waiting=tuple(barrier_views.longest_open(groups, now, most=MAX_WAITING, most_missing=MAX_MISSING)),
        decided=tuple(barrier_views.last_decided(groups, MAX_DECIDED)),
    )


def take_run(coordinator: Coordinator, run_id: str, now: Instant, *, singly: bool) -> RunData:
    """Read one run.

    Args:
        coordinator: the state.
        run_id: the run.
        now: the current time.
        singly: whether to list processes one by one instead of host by host.

    Raises:
        Refusal: RUN_NOT_FOUND.
    """
    found = coordinator.run(run_id)
    groups = found.groups.values()
    view = views.run(found, now)
    return RunData(
        taken_at=now.wall,
        run=view,
        still=now.monotonic - view.steps.moved_at if view.steps is not None else None,
        rendezvous=views.rendezvous(found, now),
        waiting=tuple(barrier_views.longest_open(groups, now, most=MAX_WAITING, most_missing=MAX_MISSING)),
        decided=tuple(barrier_views.last_decided(groups, MAX_DECIDED)),
        local=local_tier(found.local, now) if found.local.copies or len(found.local.keepers) else None,
        hosts=() if singly else tuple(views.hosts(found)),
        members=tuple(views.members(found, now)) if singly else (),
    )


def count_fully_named(decided: Iterable[barrier_views.BarrierView]) -> int:
    """Return how many decisions, newest first, may name all their missing ranks; at least one."""
    return max(1, sum(count <= MAX_MISSING for count in accumulate(len(view.missing) for view in decided)))
