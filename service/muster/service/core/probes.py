"""Which processes to probe when people ask what a run is doing."""

from collections.abc import Collection

from muster.service.core.barriers.observations import probe_target
from muster.service.core.coordinator import Coordinator
from muster.service.core.run import Run
from muster.service.core.vocabulary.effects import ProbeTarget
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.core.vocabulary.report import command, shown


def find_probe_targets(
    coordinator: Coordinator, run_id: str, ranks: Collection[int], prefix: str
) -> list[ProbeTarget]:
    """Return the processes of the named ranks, or all living ones.

    Args:
        coordinator: the state.
        run_id: the run.
        ranks: the ranks; empty: all.
        prefix: only ranks that the open barrier of this group waits for; empty: all.

    Raises:
        Refusal: RUN_NOT_FOUND or BARRIER_NOT_FOUND; MEMBER_NOT_FOUND: a rank that is named has no process;
            NO_OPEN_BARRIER: nobody waits in the group.
    """
    run = coordinator.run(run_id)
    named = set(ranks)
    for rank in sorted(named):
        _check_known(run, rank)
    missing = _missing(coordinator, run_id, prefix) if prefix else None
    return [
        probe_target(process)
        for process in run.roster
        if (process.rank in named or (not named and process.state.living))
        and (missing is None or process.rank in missing)
    ]


def _check_known(run: Run, rank: int) -> None:
    if not run.roster.of_rank(rank):
        raise Refusal(
            Reason.MEMBER_NOT_FOUND,
            f"no process has spoken for rank {rank} of run {run.run_id}. List those that did with: "
            f"{command('get members', run.run_id)}",
        )


def _missing(coordinator: Coordinator, run_id: str, prefix: str) -> frozenset[int]:
    barrier = coordinator.group(run_id, prefix).open
    if barrier is None:
        raise Refusal(
            Reason.NO_OPEN_BARRIER,
            f'group "{shown(prefix)}" of run {run_id} has no open barrier, so nobody is missing from one. '
            f"See what was decided with: {command('get barriers', run_id)}",
        )
    return frozenset(rank for rank in barrier.shape if rank not in barrier.arrivals)
