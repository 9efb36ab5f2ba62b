"""What people may see of barriers: immutable views, made when somebody asks."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from itertools import islice

from muster.service.core.barriers.group import Group
from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.model import Decision, Instant, MissingRank
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


def open_barrier(group: Group, now: Instant) -> BarrierView | None:
    """Return the group's open barrier; None if no barrier is open."""
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
    """Return a decided barrier."""
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
    """Return one barrier; without a sequence the open one, or else the last decided one.

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
    """Yield the open barrier and the newest ``history`` decided ones of every group.

    Args:
        coordinator: the state.
        run_id: the run; empty: all runs that ``shown`` selects.
        history: number of decisions of each group.
        now: the current time.
        shown: whether a run is included.

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
    """Return the barriers that have been open longest, the oldest first.

    Args:
        groups: the groups to look at.
        now: the current time.
        most: largest number of barriers.
        most_missing: largest number of missing ranks in all of them together, because naming them takes time;
            one barrier is returned in any case.
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
    """Return the newest ``most`` decisions, newest first."""
    # A group's decisions ascend, so the newest of all are in the groups that decided last.
    decided = (group for group in groups if group.decisions)
    latest = nlargest(most, decided, key=lambda group: next(reversed(group.decisions.values())).decided_at)
    newest = [one for group in latest for one in islice(reversed(group.decisions.values()), most)]
    return [decided_barrier(one) for one in nlargest(most, newest, key=lambda one: one.decided_at)]
