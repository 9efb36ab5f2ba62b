"""What people are told of the missing: whom to ask what they are doing, and how long the answer is of use.

It informs people and never a decision: nothing here is looked at when a barrier is decided.
"""

from collections import deque
from collections.abc import Iterable

from muster.service.core.membership.process import Process
from muster.service.core.membership.roster import Roster
from muster.service.core.vocabulary.effects import Asked
from muster.service.core.vocabulary.events import Seen
from muster.service.core.vocabulary.model import MemberState, Sight
from muster.service.core.vocabulary.report import printable

AHEAD = 2.0
"""Seconds before people are told of the missing that these are asked; a process has as long to answer."""
FRESH = 10.0
"""Seconds for which an answer is told. What a process did before that may be long over."""
MOST_ASKED = 64
"""So many of a barrier's missing are asked."""
MOST_TOLD = 240
"""Characters of a line about one process."""


def ahead(timeout: float) -> float:
    """How many seconds before people are told of a barrier's missing these are asked."""
    return min(AHEAD, timeout / 4)


def whom(processes: Iterable[Process | None]) -> tuple[Asked, ...]:
    """Those who can be asked; no more than a bounded number, of all hosts in turn."""
    by_host: dict[str, deque[Process]] = {}
    for process in processes:
        if process is not None and process.state is MemberState.CONNECTED and not process.unary:
            by_host.setdefault(process.host, deque()).append(process)
    chosen: list[Asked] = []
    while by_host and len(chosen) < MOST_ASKED:
        for host in list(by_host)[: MOST_ASKED - len(chosen)]:
            chosen.append(asked(by_host[host].popleft()))
            if not by_host[host]:
                del by_host[host]
    return tuple(chosen)


def asked(process: Process) -> Asked:
    """A process as one to ask; over a unary call none can be."""
    session = None if process.unary else process.session
    return Asked(session, process.rank, process.incarnation, process.host, process.pid, bool(process.relay))


def saw(roster: Roster, event: Seen, now: float) -> None:
    """Keep what processes were seen doing, for as long as it is of use."""
    for one in event.sights:
        process = roster.find(one.rank, one.incarnation)
        if process is not None:
            line = printable(" ".join(one.doing.split()))
            process.sight = Sight(line if len(line) <= MOST_TOLD else f"{line[:MOST_TOLD]}…", now)


def doing(process: Process, now: float) -> str:
    """What a process that is there was seen doing just before; empty if nobody has looked."""
    sight = process.sight
    fresh = sight is not None and now - sight.at <= FRESH and process.state is MemberState.CONNECTED
    return sight.doing if sight is not None and fresh else ""
