"""Why a rank is missing from a barrier, and which process people should look at."""

from muster.service.core.barriers import observations
from muster.service.core.barriers.owners import RankOwner
from muster.service.core.membership.process import Process
from muster.service.core.membership.roster import Roster
from muster.service.core.vocabulary.model import MemberState, MissingRank, MissingState


def process_to_name(rank: int, owner: RankOwner | None, roster: Roster) -> Process | None:
    """Return the process to name for a rank: its owner, a dead owner's successor, or its newest process."""
    if owner is None:
        return roster.newest(rank)
    successor = roster.successor(owner.process) if owner.process.state.gone else None
    return successor or owner.process


def missing_rank(rank: int, owner: RankOwner | None, roster: Roster, now: float) -> MissingRank:
    """Return why a rank is missing. ``now`` is on the monotonic clock."""
    process = process_to_name(rank, owner, roster)
    if process is None:
        return MissingRank(rank, MissingState.NEVER_JOINED)
    last = owner.last if owner is not None and owner.process is process else None
    match process.state:
        case MemberState.CONNECTED | MemberState.IDLE:
            state, gone_for = MissingState.NOT_ARRIVED, 0.0
        case MemberState.LEFT:
            state, gone_for = MissingState.LEFT, now - process.since
        case MemberState.EVICTED:
            state, gone_for = MissingState.EVICTED, now - process.since
        case MemberState.DISCONNECTED | MemberState.LOST:
            state, gone_for = MissingState.CONNECTION_LOST, now - process.since
    doing = observations.recent_activity(process, now)
    return MissingRank(rank, state, process.host, process.pid, gone_for, last, doing)
