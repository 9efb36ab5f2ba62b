"""What missing ranks are doing: which processes to probe, and how long an answer is shown.

It informs people and decides nothing: no decision reads an observation.
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
"""Seconds between a probe and the report that shows the answers."""
OBSERVATION_TTL = 10.0
"""Seconds for which reports show an observation. After that it is outdated."""
MAX_PROBE_TARGETS = 64
"""Largest number of processes that one probe asks."""
MAX_OBSERVATION_LENGTH = 240
"""Characters of one observation; the rest is cut."""


def probe_lead(timeout: float) -> float:
    """Return how many seconds before a report its missing ranks are probed."""
    return min(PROBE_LEAD, timeout / 4)


def select_probe_targets(processes: Iterable[Process | None]) -> tuple[ProbeTarget, ...]:
    """Select the connected processes, up to ``MAX_PROBE_TARGETS``, from each host in turn."""
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
    """Return a process as a target. A process of unary calls has no session and cannot be asked."""
    session = None if process.unary else process.session
    return ProbeTarget(
        session, process.rank, process.incarnation, process.host, process.pid, bool(process.relay)
    )


def record_observations(roster: Roster, event: ProbeResults, now: float) -> None:
    """Keep what each process was observed doing."""
    for one in event.results:
        process = roster.find(one.rank, one.incarnation)
        if process is not None:
            line = printable(" ".join(one.doing.split()))
            process.observation = Observation(
                line if len(line) <= MAX_OBSERVATION_LENGTH else f"{line[:MAX_OBSERVATION_LENGTH]}…", now
            )


def recent_activity(process: Process, now: float) -> str:
    """Return what a connected process was recently observed doing; empty if that is unknown."""
    observation = process.observation
    fresh = (
        observation is not None
        and now - observation.at <= OBSERVATION_TTL
        and process.state is MemberState.CONNECTED
    )
    return observation.doing if observation is not None and fresh else ""
