"""Which level a checkpoint has: pure functions of the keepers and the copies."""

from muster.service.core.local.copies import Copies
from muster.service.core.local.keepers import Keepers


def is_replicated(copies: Copies, keepers: Keepers) -> bool:
    """Return whether each part is on enough nodes, in as many failure domains as placement can reach."""
    needed = 1 + copies.checkpoint.replicas
    if needed == 1 or not copies.has_all_copies:
        return False
    domains = {keeper.info.id: keeper.domain for keeper in keepers}
    placed: dict[int, int] = {}
    """By rank: the domains that its part and the copies of it get."""
    for origin, holders in keepers.placement.items():
        # A keeper that was removed since counts as a domain of its own.
        reached = len({domains.get(one, one) for one in (origin, *holders)})
        placed.update(dict.fromkeys(keepers.ranks_of(origin), reached))
    return all(
        len({domains[holder] for holder in holders}) >= min(placed.get(rank, 1), needed)
        for rank, holders in enumerate(copies.holders)
    )
