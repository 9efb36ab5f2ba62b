"""Made-up coordinators to look at: the real core, with events fed in and the time moved by hand."""

from collections.abc import Callable
from typing import TypeVar

from muster.service.core.coordinator import Coordinator
from muster.service.core.effects import Effects
from muster.service.core.events import (
    Arrival,
    Arrive,
    CloseRun,
    Disconnected,
    Event,
    Hello,
    JoinGroup,
    JoinRendezvous,
    ProcessInfo,
    Tick,
)
from muster.service.core.model import Instant, NodeInfo, RendezvousSettings

T = TypeVar("T")
WALL = 1_790_000_000.0
RANKS_PER_NODE = 8
TTL = 10.0


class Scene:
    """A coordinator and its time; the status page may look at it as at a driver."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(session_ttl=TTL, epoch=3)
        self.now = 1_000.0
        self._sessions = 0

    async def query(self, ask: Callable[[Coordinator, Instant], T]) -> T:
        return ask(self.coordinator, self.instant)

    @property
    def instant(self) -> Instant:
        return Instant(self.now, WALL + self.now)

    def do(self, event: Event) -> Effects:
        effects = Effects()
        self.coordinator.step(event, self.instant, effects)
        return effects

    def session(self) -> int:
        self._sessions += 1
        return self._sessions

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (deadline := self.coordinator.next_deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            self.do(Tick())
        self.now = end


class Job:
    """A run whose nodes hold a stream each, that speaks for their ranks."""

    def __init__(
        self, scene: Scene, run_id: str, ranks: int, *, host: str = "node-{:d}", absent: range = range(0)
    ) -> None:
        self.scene = scene
        self.run_id = run_id
        self.ranks = ranks
        self.host = host
        nodes = range(0, ranks, RANKS_PER_NODE)
        settings = RendezvousSettings(
            min_nodes=len(nodes),
            max_nodes=len(nodes),
            join_timeout=600,
            last_call_timeout=30,
            keep_alive_timeout=300,
        )
        for number in range(len(nodes)):
            node = NodeInfo(f"agent-{number}", host.format(number), 900 + number)
            scene.do(JoinRendezvous(scene.session(), run_id, node, 1, settings))
        self.streams = {number: scene.session() for number, first in enumerate(nodes) if first not in absent}
        for number, session in self.streams.items():
            processes = [
                ProcessInfo(rank, f"life-{rank}", host.format(number), 4100 + rank, 0, number)
                for rank in self.of_node(number)
            ]
            scene.do(Hello(session, run_id, 0, tuple(processes)))

    def of_node(self, number: int) -> range:
        return range(number * RANKS_PER_NODE, min(self.ranks, (number + 1) * RANKS_PER_NODE))

    def join(self, prefix: str) -> None:
        for session in self.streams.values():
            self.scene.do(JoinGroup(session, prefix, self.ranks))

    def meet(
        self,
        prefix: str,
        sequence: int,
        *,
        without: tuple[int, ...] = (),
        failure: tuple[int, str] | None = None,
        timeout: float = 300.0,
        pace: float = 0.0,
    ) -> None:
        """All living nodes arrive, but for some ranks; ``failure`` is one rank's vote, at the end."""
        for number, session in self.streams.items():
            left_out = {*without, failure[0] if failure else -1}
            arrivals = tuple(Arrival(rank) for rank in self.of_node(number) if rank not in left_out)
            if arrivals:
                self.scene.do(Arrive(session, prefix, sequence, timeout, arrivals))
            self.scene.wait(pace)
        if failure is not None:
            session = self.streams[failure[0] // RANKS_PER_NODE]
            self.scene.do(
                Arrive(session, prefix, sequence, timeout, (Arrival(failure[0], failure=failure[1]),))
            )

    def lose(self, number: int) -> None:
        """The stream of a node breaks."""
        self.scene.do(Disconnected(self.streams.pop(number)))

    def close(self, by: str, reason: str) -> None:
        self.scene.do(CloseRun(self.scene.session(), self.run_id, by, reason))


def sixteen() -> Scene:
    """A job of 16 ranks whose barrier misses two, beside two smaller ones."""
    scene = Scene()
    old = Job(scene, "vit-small-sweep-3", 8, host="gpu-c{:d}")
    old.join("checkpoint")
    old.meet("checkpoint", 0)
    old.close("ann@desk", "the budget is spent")
    scene.wait(1_340)
    small = Job(scene, "vit-small", 8, host="gpu-b{:d}")
    small.join("checkpoint")
    big = Job(scene, "llama-70b", 16, host="gpu-a{:d}")
    for prefix in ("checkpoint", "save", "save/commit"):
        big.join(prefix)
    small.meet("checkpoint", 0)
    big.meet("checkpoint", 0, pace=1.2)
    scene.wait(288)
    small.meet(
        "checkpoint", 1, failure=(3, "OSError: [Errno 28] No space left on device: '/ckpt/step-30900'")
    )
    big.meet("save", 0, pace=0.9)
    big.meet("save/commit", 0, pace=0.2)
    scene.wait(301)
    small.meet("checkpoint", 2)
    big.meet("checkpoint", 1, pace=0.7)
    scene.wait(290)
    small.meet("checkpoint", 3)
    big.meet("save", 1, without=(6,), timeout=600)
    scene.wait(3.6)
    big.meet("checkpoint", 2, without=(6, 11))
    scene.wait(41)
    return scene


def many(ranks: int = 4_096) -> Scene:
    """A job of many ranks: a node was lost, a node never came, and a rack is late."""
    scene = Scene()
    job = Job(scene, "moe-400b", ranks, host="h100-{:04d}", absent=range(ranks - 2 * RANKS_PER_NODE, ranks))
    for prefix in ("checkpoint", "save", "save/commit"):
        job.join(prefix)
    late = tuple(range(ranks // 2, ranks // 2 + 64)) + tuple(range(37, ranks // 2, 301))
    job.meet("save", 0, without=late[64:], timeout=60)
    scene.wait(340)
    job.lose(ranks // RANKS_PER_NODE // 3)
    scene.wait(2)
    job.meet("checkpoint", 0, without=late, timeout=900)
    scene.wait(7)
    job.meet("save", 1, without=tuple(range(ranks // 4, ranks)), timeout=900)
    return scene
