"""The ranks that have not saved at the deadline of a requested save."""

from muster.service.core.barriers import observations
from muster.service.core.barriers.group import Group
from muster.service.core.barriers.missing import missing_rank, process_to_name
from muster.service.core.membership.roster import Roster
from muster.service.core.vocabulary.effects import ProbeTarget
from muster.service.core.vocabulary.model import MissingRank


def late_ranks(group: Group | None, roster: Roster, now: float) -> list[MissingRank]:
    """Return the ranks that have not saved, each with the reason. ``now`` is on the monotonic clock."""
    owners = group.owners if group is not None else {}
    return [missing_rank(rank, owners.get(rank), roster, now) for rank in _waited_for(group, roster)]


def probe_targets(group: Group | None, roster: Roster) -> tuple[ProbeTarget, ...]:
    """Select the processes to probe before the ranks that have not saved are named."""
    owners = group.owners if group is not None else {}
    processes = (process_to_name(rank, owners.get(rank), roster) for rank in _waited_for(group, roster))
    return observations.select_probe_targets(processes)


def _waited_for(group: Group | None, roster: Roster) -> list[int]:
    """Return the ranks that a requested save waits for.

    They are those that the open barrier misses. If no rank has arrived yet, they are all of the group; if no
    rank has joined the group, they are all of the run.
    """
    if group is not None and group.open is not None:
        return [rank for rank in group.open.shape if rank not in group.open.arrivals]
    if group is not None and group.owners:
        return sorted(group.owners)
    return sorted({process.rank for process in roster if not process.state.gone})
