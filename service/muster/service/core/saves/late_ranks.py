"""The ranks that have not saved at the deadline of a requested save."""

from collections.abc import Mapping
from typing import NamedTuple

from muster.service.core.barriers import observations
from muster.service.core.barriers.group import Group
from muster.service.core.barriers.missing import missing_rank, process_to_name
from muster.service.core.barriers.owners import RankOwner
from muster.service.core.membership.roster import Roster
from muster.service.core.vocabulary.effects import ProbeTarget
from muster.service.core.vocabulary.model import MissingRank

MAX_NAMED = 1_024
"""Late ranks that are named. Naming 65,536 would stop the loop for half a second."""


class LateRanks(NamedTuple):
    """The ranks that have not saved."""

    named: list[MissingRank]
    """The first of them, each with the reason."""
    total: int
    """How many there are."""


def late_ranks(group: Group | None, roster: Roster, now: float) -> LateRanks:
    """Return the ranks that have not saved. ``now`` is on the monotonic clock."""
    owners, ranks = _owners(group, roster), _waited_for(group, roster)
    named = [missing_rank(rank, owners.get(rank), roster, now) for rank in ranks[:MAX_NAMED]]
    return LateRanks(named, len(ranks))


def probe_targets(group: Group | None, roster: Roster) -> tuple[ProbeTarget, ...]:
    """Select the processes to probe before the ranks that have not saved are named."""
    owners = _owners(group, roster)
    processes = (
        process_to_name(rank, owners.get(rank), roster) for rank in _waited_for(group, roster)[:MAX_NAMED]
    )
    return observations.select_probe_targets(processes)


def _waited_for(group: Group | None, roster: Roster) -> list[int]:
    """Return the ranks that a requested save waits for.

    They are those that the open barrier misses. If no rank has arrived yet, they are all of the group; if no
    rank has joined the group, they are all of the run.
    """
    if group is not None and group.open is not None:
        return [rank for rank in group.open.shape if rank not in group.open.arrivals]
    if owners := _owners(group, roster):
        return sorted(owners)
    return sorted({process.rank for process in roster if not process.state.gone})


def _owners(group: Group | None, roster: Roster) -> Mapping[int, RankOwner]:
    """Return the owners of ranks in the group; empty if they are of an earlier generation."""
    return group.owners if group is not None and group.generation == roster.generation else {}
