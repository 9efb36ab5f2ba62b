"""Made-up coordinators to look at: the real core, with events fed in and the time moved by hand."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.effects import Effects, ProbeTarget
from muster.service.core.vocabulary.events import (
    Arrival,
    Arrive,
    CloseRun,
    Disconnected,
    Event,
    Hello,
    JoinGroup,
    JoinRendezvous,
    ProcessInfo,
    Stepped,
    Tick,
    WriteReport,
)
from muster.service.core.vocabulary.local import (
    Attachment,
    Attempt,
    CommitLocal,
    ConnectKeeper,
    Disk,
    Holding,
    KeeperInfo,
    LocalCheckpoint,
    Orders,
    ReportKeeper,
)
from muster.service.core.vocabulary.model import Instant, NodeInfo, RendezvousSettings
from muster.service.draining import DRAINING
from muster.service.insight import words
from muster.service.insight.inspector import ProcessAnswer
from muster.v1.insight_pb2 import Report

T = TypeVar("T")
WALL = 1_790_000_000.0
RANKS_PER_NODE = 8
TTL = 10.0
ROOMY = Disk(used=96 << 30, quota=160 << 30)


class Scene:
    """A coordinator and its time; the status page may look at it as at a driver, and ask its processes."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(session_ttl=TTL, epoch=3)
        self.now = 1_000.0
        self.retired = False
        self.says: dict[int, Report] = {}
        """By rank, what a process says when it is asked; the others do not answer."""
        self._sessions = 0

    async def query(self, ask: Callable[[Coordinator, Instant], T]) -> T:
        if self.retired:
            raise DRAINING
        return ask(self.coordinator, self.instant)

    async def ask(self, processes: Sequence[ProbeTarget]) -> list[ProcessAnswer]:
        return [
            ProcessAnswer(one, said := self.says.get(one.rank), "" if said else words.NO_ANSWER)
            for one in processes
        ]

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
    """A run whose streams each speak for some ranks, in order.

    Args:
        scene: where it is.
        run_id: its id.
        ranks: how many there are to be.
        host: the name of a host, with a place for its number.
        per_stream: how many ranks a stream speaks for; those of one node at the most.
        absent: the ranks that never come.
    """

    def __init__(
        self,
        scene: Scene,
        run_id: str,
        ranks: int,
        *,
        host: str = "node-{:d}",
        per_stream: int = 1,
        absent: range = range(0),
    ) -> None:
        self.scene = scene
        self.run_id = run_id
        self.ranks = ranks
        self.per_stream = per_stream
        nodes = ranks // RANKS_PER_NODE
        settings = RendezvousSettings(
            min_nodes=nodes, max_nodes=nodes, join_timeout=600, last_call_timeout=30, keep_alive_timeout=300
        )
        for number in range(nodes):
            node = NodeInfo(f"agent-{number}", host.format(number), 900 + number)
            scene.do(JoinRendezvous(scene.session(), run_id, node, 1, settings))
        self.streams = {
            first: scene.session() for first in range(0, ranks, per_stream) if first not in absent
        }
        for first, session in self.streams.items():
            node_rank = first // RANKS_PER_NODE
            processes = [
                ProcessInfo(rank, f"life-{rank}", host.format(node_rank), 4100 + rank, 0, node_rank)
                for rank in range(first, first + per_stream)
            ]
            scene.do(Hello(session, run_id, 0, tuple(processes)))

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
        report: Callable[[int], WriteReport | None] = lambda _: None,
    ) -> None:
        """Let all present ranks arrive, except ``without``.

        Args:
            prefix: the group.
            sequence: of the barrier.
            without: the ranks that do not arrive.
            failure: a rank and its failure vote, which comes last.
            timeout: seconds of the barrier.
            pace: seconds between the arrivals of two streams.
            report: returns what a rank reports of its write.
        """
        left_out = {*without, failure[0] if failure else -1}
        for first, session in list(self.streams.items()):
            ranks = [rank for rank in range(first, first + self.per_stream) if rank not in left_out]
            if ranks:
                arrivals = tuple(Arrival(rank, report=report(rank)) for rank in ranks)
                self.scene.do(Arrive(session, prefix, sequence, timeout, arrivals))
            self.scene.wait(pace)
        if failure is not None:
            rank, reason = failure
            session = self.streams[rank - rank % self.per_stream]
            arrival = Arrival(rank, failure=reason, report=report(rank))
            self.scene.do(Arrive(session, prefix, sequence, timeout, (arrival,)))

    def step(self, number: int, *, behind: dict[int, int]) -> None:
        """Let all present ranks report their training step; ``behind``: the steps of those that differ."""
        for first, session in self.streams.items():
            ranks = range(first, first + self.per_stream)
            self.scene.do(Stepped(session, tuple((rank, behind.get(rank, number)) for rank in ranks)))

    def lose(self, first: int) -> None:
        """The stream of a rank breaks."""
        self.scene.do(Disconnected(self.streams.pop(first)))

    def close(self, by: str, reason: str) -> None:
        self.scene.do(CloseRun(self.scene.session(), self.run_id, by, reason))


class Keepers:
    """The keepers of a run, each for one rank, which hold what they are ordered to hold.

    Args:
        scene: where they are.
        run_id: the run.
        nodes: how many nodes it has.
        generation: of the ranks.
        domains: how many failure domains the nodes are in, in turn; 0: none has a name.
        disk: the space of each of them.
    """

    def __init__(
        self,
        scene: Scene,
        run_id: str,
        nodes: int,
        *,
        generation: int = 1,
        domains: int = 2,
        disk: Disk = ROOMY,
    ) -> None:
        self.scene = scene
        self.run_id = run_id
        self.nodes = nodes
        self.generation = generation
        self.sessions: dict[int, int] = {}
        for number in range(nodes):
            self.sessions[number] = scene.session()
            info = KeeperInfo(
                f"keeper-{number}",
                f"http://10.0.0.{number}:40123",
                f"rack-{number % domains}" if domains else "",
                f"gpu-d{number}",
                "0.1.0",
            )
            attachment = Attachment(generation, nodes, frozenset({number}), 1)
            self.scene.do(ConnectKeeper(self.sessions[number], run_id, info, (), disk, "secret", attachment))
        self.persist_to = ""

    def save(self, step: int, number: int, *, copies: bool = True, persisted_as: str = "") -> None:
        """Make a checkpoint; ``copies``: the keepers fetch what they are ordered to hold."""
        attempt, digest = Attempt(self.generation, number), number.to_bytes(16, "big")
        checkpoint = LocalCheckpoint(
            attempt, step, self.nodes, 100, digest, 1, self.persist_to, size=self.nodes * (12 << 30)
        )
        self.scene.do(CommitLocal(self.scene.session(), self.run_id, checkpoint, "keeper-0"))
        newest: dict[int, Orders] = {}
        for keeper in self.sessions:
            effects = self._report(keeper, Holding(attempt, digest, frozenset({keeper})))
            for delivery in effects.deliveries:
                if isinstance(delivery.message, Orders):
                    newest |= {session: delivery.message for session in delivery.audience}
        for keeper, session in self.sessions.items() if copies else ():
            orders = newest[session].checkpoints
            ranks = next(frozenset(one.ranks) for one in orders if one.checkpoint.attempt == attempt)
            everything = frozenset(range(self.nodes)) if persisted_as else frozenset()
            self._report(keeper, Holding(attempt, digest, ranks, everything, persisted_as))

    def lose(self, number: int) -> None:
        """The stream of a keeper breaks."""
        self.scene.do(Disconnected(self.sessions.pop(number)))

    def _report(self, number: int, holding: Holding) -> Effects:
        session = self.scene.session()
        return self.scene.do(ReportKeeper(session, self.run_id, f"keeper-{number}", (holding,), 0))


def written(step: int, slowest: int, *, commits: bool = False) -> Callable[[int], WriteReport]:
    """What each rank tells of its part of a save, which takes one of them longer than the others."""

    def report(rank: int) -> WriteReport:
        seconds = 38.25 if rank == slowest else 30.0 + rank / 10
        return WriteReport(step=step, bytes=86 << 30, seconds=seconds, commits=commits)

    return report


def sixteen() -> Scene:
    """A job of 16 ranks whose barrier misses two, beside two smaller ones."""
    scene = Scene()
    old = Job(scene, "vit-sweep-3", 8, host="gpu-c{:d}")
    old.join("checkpoint")
    old.meet("checkpoint", 0, pace=0.005)
    old.close("ann@desk", "the budget is spent")
    for rank in range(8):
        old.lose(rank)
    scene.wait(1_340)
    small = Job(scene, "vit-small", 8, host="gpu-b{:d}")
    small.join("checkpoint")
    big = Job(scene, "llama-70b", 16, host="gpu-a{:d}")
    for prefix in ("checkpoint", "save", "save/commit"):
        big.join(prefix)
    small.meet("checkpoint", 0, pace=0.002, report=written(0, 7, commits=True))
    big.meet("checkpoint", 0, pace=0.12)
    scene.wait(288)
    full = "OSError: [Errno 28] No space left on device: '/ckpt/step-30900'"
    small.meet("checkpoint", 1, failure=(3, full), report=written(500, 7, commits=True))
    big.meet("save", 0, pace=0.09, report=written(30_900, 11))
    big.meet("save/commit", 0, pace=0.02, report=written(30_900, 11, commits=True))
    scene.wait(301)
    small.meet("checkpoint", 2, pace=0.003, report=written(1_000, 7, commits=True))
    big.meet("checkpoint", 1, pace=0.07)
    scene.wait(290)
    small.meet("checkpoint", 3, pace=0.002, report=written(1_500, 7, commits=True))
    big.step(31_200, behind={6: 31_187})
    big.meet("checkpoint", 2, without=(6, 11))
    scene.wait(34)
    big.meet("save", 1, without=(11,), timeout=600, report=written(31_200, 11))
    scene.wait(1)
    big.lose(11)
    scene.wait(6)
    return scene


def local() -> Scene:
    """A run of four nodes with local checkpoints: the newest one is still without copies."""
    scene = Scene()
    keepers = Keepers(scene, "llama-8b", 4)
    keepers.persist_to = "s3://bucket/llama-8b"
    keepers.save(300, 3, persisted_as="s3://bucket/llama-8b/step-300")
    scene.wait(60)
    keepers.save(310, 4)
    scene.wait(60)
    keepers.save(320, 5, copies=False)
    scene.wait(2)
    return scene


def many(ranks: int = 4_096) -> Scene:
    """A job of many ranks: a node was lost, two never came, a part of a rack is late, and a save begins."""
    scene = Scene()
    job = Job(
        scene,
        "moe-400b",
        ranks,
        host="h100-{:04d}",
        per_stream=RANKS_PER_NODE,
        absent=range(ranks - 2 * RANKS_PER_NODE, ranks),
    )
    for prefix in ("checkpoint", "save", "save/commit"):
        job.join(prefix)
    stragglers = tuple(range(37, ranks // 2, 301))
    rack = tuple(range(ranks // 2, ranks // 2 + 32))
    job.meet("save", 0, without=stragglers, timeout=60)
    scene.wait(340)
    job.lose(ranks // 3 // RANKS_PER_NODE * RANKS_PER_NODE)
    scene.wait(2)
    job.meet("checkpoint", 0, without=(*stragglers, *rack), timeout=900)
    scene.wait(6)
    job.meet("save", 1, without=tuple(range(ranks // 4, ranks)), timeout=900)
    scene.wait(1)
    return scene
