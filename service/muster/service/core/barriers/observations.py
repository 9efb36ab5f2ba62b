"""What people are told of the missing: whom to ask what they are doing, and how long the answer is of use.

It informs people and never a decision: nothing here is looked at when a barrier is decided.
"""

from collections import deque
from collections.abc import Iterable

from muster.service.core.membership.process import Process
from muster.service.core.membership.roster import Roster
from muster.service.core.vocabulary.effects import ProbeTarget
from muster.service.core.vocabulary.events import ProbeResults
from muster.service.core.vocabulary.model import MemberState, Observation
from muster.service.core.vocabulary.report import printable

PROBE_LEAD = 2.0
"""Seconds before people are told of the missing that these are asked; a process has as long to answer."""
OBSERVATION_TTL = 10.0
"""Seconds for which an answer is told. What a process did before that may be long over."""
MAX_PROBE_TARGETS = 64
"""So many of a barrier's missing are asked."""
MAX_OBSERVATION_LENGTH = 240
"""Characters of a line about one process."""


def probe_lead(timeout: float) -> float:
    """How many seconds before people are told of a barrier's missing these are asked."""
    return min(PROBE_LEAD, timeout / 4)


def select_probe_targets(processes: Iterable[Process | None]) -> tuple[ProbeTarget, ...]:
    """Those who can be asked; no more than a bounded number, of all hosts in turn."""
    by_host: dict[str, deque[Process]] = {}
    for process in processes:
        if process is not None and process.state is MemberState.CONNECTED and not process.unary:
            by_host.setdefault(process.host, deque()).append(process)
    chosen: list[ProbeTarget] = []
    while by_host and len(chosen) < MAX_PROBE_TARGETS:
        for host in list(by_host)[: MAX_PROBE_TARGETS - len(chosen)]:
            chosen.append(probe_target(by_host[host].popleft()))
            if not by_host[host]:
                del by_host[host]
    return tuple(chosen)


def probe_target(process: Process) -> ProbeTarget:
    """A process as one to ask; over a unary call none can be."""
    session = None if process.unary else process.session
    return ProbeTarget(
        session, process.rank, process.incarnation, process.host, process.pid, bool(process.relay)
    )


def record_observations(roster: Roster, event: ProbeResults, now: float) -> None:
    """Keep what processes were seen doing, for as long as it is of use."""
    for one in event.results:
        process = roster.find(one.rank, one.incarnation)
        if process is not None:
            line = printable(" ".join(one.doing.split()))
            process.observation = Observation(
                line if len(line) <= MAX_OBSERVATION_LENGTH else f"{line[:MAX_OBSERVATION_LENGTH]}…", now
            )


def recent_activity(process: Process, now: float) -> str:
    """What a process that is there was seen doing just before; empty if nobody has looked."""
    observation = process.observation
    fresh = (
        observation is not None
        and now - observation.at <= OBSERVATION_TTL
        and process.state is MemberState.CONNECTED
    )
    return observation.doing if observation is not None and fresh else ""
