"""What happens to the coordinator, as the driver reports it."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from muster.service.core.vocabulary.local import LocalEvent
from muster.service.core.vocabulary.model import NodeInfo, RendezvousSettings, SessionId
from muster.service.core.vocabulary.operations import Operation


class ProcessInfo(NamedTuple):
    """One process of a Hello."""

    rank: int
    incarnation: str
    host: str
    pid: int
    ordinal: int = 0
    """The ordinal that an earlier Welcome gave to this incarnation; 0 at its first hello."""
    node_rank: int | None = None
    """The rank of its node in its round, for people."""
    age: float = 0.0
    """Seconds that it had been running when it said hello; 0 if unknown."""
    node_name: str = ""
    """The name of its node as the scheduler knows it; empty: the same as the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteReport:
    """One rank's part of a save, sent at each barrier of that save. It informs people and decides nothing."""

    step: int | None = None
    """The training step; None: the save has none."""
    bytes: int | None = None
    """Bytes that the rank wrote; None: it does not know."""
    seconds: float | None = None
    """Seconds that its write took; None: it does not know."""
    commits: bool = False
    """The barrier is the last one of the save: its release commits the checkpoint."""
    gives_up: bool = False
    """The rank has given the save up: the save has failed, even if the barrier is released."""


class Arrival(NamedTuple):
    """One rank's arrival."""

    rank: int
    payload: bytes = b""
    failure: str | None = None
    """Set: a vote to fail, for this reason."""
    report: WriteReport | None = None
    """None: the barrier belongs to no save."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A session names the processes that it speaks for."""

    session: SessionId
    run_id: str
    generation: int
    processes: tuple[ProcessInfo, ...]
    relay: str = ""
    """Set: it is a relay's stream, whose processes enter one by one."""


@dataclass(frozen=True, slots=True)
class AddProcesses:
    """A relay adds processes to its stream."""

    session: SessionId
    processes: tuple[ProcessInfo, ...]


@dataclass(frozen=True, slots=True)
class RemoveProcesses:
    """A relay removes processes from its stream."""

    session: SessionId
    ranks: tuple[int, ...]
    goodbye: str | None = None
    """Why they left on purpose, for the log; None: they lost their connection to the relay."""


@dataclass(frozen=True, slots=True)
class JoinGroup:
    """Processes of a session take part in a group."""

    session: SessionId
    prefix: str
    world_size: int
    participants: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    """Empty: every rank of the session."""


class Arrive(NamedTuple):
    """Ranks of a session arrive at a barrier. The hot path: a tuple, because it is the cheapest."""

    session: SessionId
    prefix: str
    sequence: int | None
    """None: the next one for the rank."""
    timeout: float
    """Seconds."""
    arrivals: tuple[Arrival, ...]
    progress_after: float = 0.0
    """Seconds until waiting ranks learn which ranks are missing: at most, and for 0, half of the timeout."""
    waited: float = 0.0
    """Seconds since it was first sent, perhaps to an earlier coordinator; 0 when first sent."""


@dataclass(frozen=True, slots=True)
class ArriveOnce:
    """A unary call says hello, joins a group and arrives, all at once or not at all.

    The end of the call does not mean the end of the process.
    """

    session: SessionId
    run_id: str
    generation: int
    process: ProcessInfo
    prefix: str
    world_size: int
    participants: tuple[int, ...]
    sequence: int | None
    """None: the next one for the rank."""
    timeout: float
    """Seconds."""
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class Stepped:
    """Processes of a session report their training steps. They inform people and decide nothing."""

    session: SessionId
    steps: tuple[tuple[int, int], ...]
    """(rank, step)."""


@dataclass(frozen=True, slots=True)
class Goodbye:
    """A session's processes leave on purpose."""

    session: SessionId
    reason: str = ""
    """For the log."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A session's stream is over."""

    session: SessionId
    reset: bool = False
    """Its connection ended without the coordinator: the peer's host closed it, or answered no pings."""


@dataclass(frozen=True, slots=True)
class Abort:
    """An operator aborts a group's open barrier; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    prefix: str
    reason: str
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class JoinRendezvous:
    """A node asks for a place in a round, or reconnects to the place that it has."""

    session: SessionId
    run_id: str
    node: NodeInfo
    attempt: int
    """How often it has asked for a new round, from 1. A repeated number means the same place."""
    settings: RendezvousSettings
    round: int | None = None
    """The round that it has heard for this attempt."""
    waited: float = 0.0
    """Seconds that this attempt has waited for a round, perhaps with an earlier coordinator."""


@dataclass(frozen=True, slots=True)
class LeaveRendezvous:
    """A node gives up its place; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    incarnation: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CloseRun:
    """An operator or node closes a run for good; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    by: str
    reason: str
    abort_barriers: bool = False
    create: bool = False
    """Create an unknown run as a closed one, so that nobody can join it later."""
    even_if_stopped: bool = False
    """Close a run that was stopped, too, although it could be resumed."""


@dataclass(frozen=True, slots=True)
class Evict:
    """An operator evicts the processes of a rank; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class EvictNode:
    """An operator evicts the agents of one machine; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    node_name: str
    """The name or the address of the machine."""
    by: str
    reason: str
    only_if_spare: bool = False
    """Evict nobody if fewer connected nodes of other machines stand by than are evicted from the round."""


@dataclass(frozen=True, slots=True)
class Forget:
    """An operator removes a run and all its records; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    force: bool = False
    """Remove it even if it is in use; its streams and waiting calls end."""


@dataclass(frozen=True, slots=True)
class RequestSave:
    """Asks all ranks of a run to save at one step; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    stop: bool
    """Training ends after the save."""
    by: str
    reason: str
    known: int | None = None
    """The newest request that the caller had heard of; None: unknown."""
    across_generations: bool = False
    """Keep a request with ``stop`` in force when a newer generation starts."""
    deadline: float | None = None
    """Seconds from now until the save must be complete."""
    notice: str = ""
    """The id of the notice that caused it; empty: none."""
    generation: int | None = None
    """The generation of the process that asks; None: the caller is no process of the run."""


@dataclass(frozen=True, slots=True)
class DrainNode:
    """Asks each run that has a process or an agent on a node to save; the answer goes to ``session``."""

    session: SessionId
    node_name: str
    run_ids: tuple[str, ...]
    """The runs that the caller may touch. Those without anything on the node are not asked."""
    stop: bool
    by: str
    reason: str
    deadline: float | None = None
    """Seconds from now until the saves must be complete."""
    notice: str = ""
    """The id of the notice that caused it; empty: none."""
    only_run: str = ""
    """The only run that is asked; empty: every run on the node."""


@dataclass(frozen=True, slots=True)
class CancelSave:
    """Withdraws the pending request of a save; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """A call for an operation on a run's store; the answer goes to ``session``."""

    session: SessionId
    run_id: str
    operation: Operation


class ProbeResult(NamedTuple):
    """What one process was observed doing."""

    rank: int
    incarnation: str
    doing: str


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """The answers to a :class:`~muster.service.core.vocabulary.effects.ProbeRequest`. They decide nothing."""

    run_id: str
    results: tuple[ProbeResult, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """The next deadline is due."""


Event: TypeAlias = (
    Hello
    | AddProcesses
    | RemoveProcesses
    | JoinGroup
    | Arrive
    | ArriveOnce
    | Stepped
    | Goodbye
    | Disconnected
    | Abort
    | JoinRendezvous
    | LeaveRendezvous
    | CloseRun
    | Evict
    | EvictNode
    | Forget
    | RequestSave
    | DrainNode
    | CancelSave
    | StoreRequest
    | ProbeResults
    | LocalEvent
    | Tick
)
