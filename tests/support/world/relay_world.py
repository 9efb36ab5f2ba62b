"""Workers, relays and the real core, joined by pipes that deliver when a test says so: no sockets, no clock.

The workers do what the SDK's sessions do: they connect again when their stream ends, and repeat what is open.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from muster.relay.downstream_stream import DownstreamStream
from muster.relay.refusals import Refused as RefusedByRelay
from muster.relay.refusals import info_of
from muster.relay.router import StreamRouter
from muster.relay.stats import RelayStats
from muster.relay.upstream_stream import UpstreamStream
from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.effects import Effects, Refused
from muster.service.core.vocabulary.events import Disconnected, Event, Goodbye, Tick
from muster.service.core.vocabulary.model import Instant
from muster.service.core.vocabulary.refusal import Refusal
from muster.service.rpc import codec, errors
from muster.serving.outbox import Outbox
from muster.v1 import common_pb2
from muster.v1 import session_pb2 as pb
from muster.v1.insight_pb2 import Inspected
from tests.support.world.relay_bench import Timers

RUN = "job"
TTL = 10.0
TIMEOUT = 60.0


class Client(Protocol):
    def heard(self, data: bytes) -> None: ...
    def ended(self, refusal: pb.Refusal | None) -> None: ...


class Server(Protocol):
    def hear(self, data: bytes) -> None: ...
    def lost(self) -> None: ...


@dataclass(frozen=True)
class End:
    refusal: pb.Refusal | None


@dataclass(eq=False)
class Pipe:
    """One stream; what is said waits until it is delivered."""

    client: Client
    server: Server | None = None
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes | End] = field(default_factory=deque)
    client_gone: bool = False
    server_gone: bool = False

    def say(self, data: bytes) -> None:
        if not self.client_gone:
            self.up.append(data)

    def tell(self, data: bytes) -> None:
        if not self.server_gone:
            self.down.append(data)

    def end(self, refusal: pb.Refusal | None) -> None:
        if not self.server_gone:
            self.down.append(End(refusal))

    @property
    def idle(self) -> bool:
        return not (self.up or self.down)

    def deliver_up(self) -> None:
        if self.up and not self.server_gone:
            data = self.up.popleft()
            assert self.server is not None
            self.server.hear(data)

    def deliver_down(self) -> None:
        if not self.down or self.client_gone:
            return
        match self.down.popleft():
            case End(refusal):
                self.client_gone = self.server_gone = True
                assert self.server is not None
                self.server.lost()
                self.client.ended(refusal)
            case data:
                self.client.heard(data)

    def break_client(self) -> None:
        """The client's end sees that the stream is lost; what was under way may still arrive above."""
        if not self.client_gone:
            self.client_gone = True
            self.down.clear()
            self.client.ended(None)

    def break_server(self) -> None:
        """The server's end sees it."""
        if not self.server_gone:
            self.server_gone = True
            self.up.clear()
            assert self.server is not None
            self.server.lost()


class AtCoordinator:
    """The coordinator's end of a stream."""

    def __init__(self, world: "World", pipe: Pipe, session: int) -> None:
        self._world = world
        self.pipe = pipe
        self.session = session
        self.over = False

    def hear(self, data: bytes) -> None:
        if self.over:
            return
        try:
            event = codec.parse_session_message(self.session, data)
        except Refusal as refusal:
            self._end(refusal)
            return
        if isinstance(event, Inspected):
            return  # Nobody has asked.
        self._world.step(event)
        if type(event) is Goodbye and not self.over:
            self._end(None)

    def _end(self, refusal: Refusal | None) -> None:
        self.over = True
        self.pipe.end(as_pb(refusal) if refusal is not None else None)

    def lost(self) -> None:
        self.over = True
        self._world.sessions.pop(self.session, None)
        self._world.step(Disconnected(self.session))

    def deliver(self, message: object, data: bytes) -> None:
        if self.over:
            return
        self.pipe.tell(data)
        if isinstance(message, Refused) and message.final:
            self._end(message.refusal)


class AtRelay:
    """A relay's end of a downstream stream: its sink."""

    def __init__(self, node: "RelayNode", pipe: Pipe) -> None:
        self.pipe = pipe
        self.over = False
        self._node = node
        self._stream = DownstreamStream(node.router, self, lambda _: None)

    def hear(self, data: bytes) -> None:
        if self.over:
            return
        try:
            self._stream.receive(data)
        except RefusedByRelay as refused:
            self._stream.end(refused.refusal, announce=True)

    def lost(self) -> None:
        self._stream.connection_lost()
        if self in self._node.below:
            self._node.below.remove(self)

    def send(self, data: bytes, own: bytes = b"") -> None:
        self.pipe.tell(data + own)

    def end(self, refusal: pb.Refusal | None) -> None:
        self.over = True
        self.pipe.end(refusal)


class PipeOutbox(Outbox):
    """Puts the messages of an upstream stream into its pipe at once."""

    pipe: Pipe

    def put(self, data: bytes, own: bytes = b"") -> None:
        self.pipe.say(data + own)


class AtUpstreamStream:
    """The relay's end of an upstream stream."""

    def __init__(self, stream: UpstreamStream) -> None:
        self._stream = stream
        self._welcomed = False

    def heard(self, data: bytes) -> None:
        self._stream.receive(data)

    def ended(self, refusal: pb.Refusal | None) -> None:
        self._stream.end(refusal or pb.Refusal(code=14, message="lost"))


class RelayNode:
    """A relay, its clock, and where it connects to."""

    def __init__(self, world: "World", name: str, above: "RelayNode | None") -> None:
        self._world = world
        self.name = name
        self.above = above
        self.dead = False
        self.below: list[AtRelay] = []
        self.timers = Timers()
        self.stats = RelayStats()
        self.pipes: list[Pipe] = []
        self.router = StreamRouter(self._open, lambda: [], name)

    def _open(
        self, run_id: str, generation: int, on_closed: Callable[[UpstreamStream], None]
    ) -> UpstreamStream:
        outbox = PipeOutbox()
        stream = UpstreamStream(
            run_id,
            generation,
            outbox=outbox,
            call_later=self.timers.after,
            on_closed=on_closed,
            stats=self.stats,
        )
        pipe = outbox.pipe = self._world.open(AtUpstreamStream(stream), self.above)
        self.pipes.append(pipe)
        hello = pb.Hello(run_id=run_id, generation=generation, protocol_version=1, relay=self.name)
        pipe.say(pb.ConnectRequest(hello=hello).SerializeToString())
        return stream

    def take(self, pipe: Pipe) -> AtRelay:
        end = AtRelay(self, pipe)
        self.below.append(end)
        return end

    def die(self) -> None:
        """End all its streams; the other ends notice."""
        below, above = [end.pipe for end in self.below], self.pipes
        self.below, self.pipes = [], []
        for pipe in below:
            pipe.server_gone = True
            pipe.up.clear()
            pipe.break_client()
        for pipe in above:
            pipe.client_gone = True
            pipe.down.clear()
            pipe.break_server()
        self.timers.waiting.clear()
        self.router = StreamRouter(self._open, lambda: [], self.name)


@dataclass
class Turn:
    """A worker's arrival that has no answer yet."""

    sequence: int
    failure: str | None
    since: float


class Worker:
    """A process: what the SDK's session does, in as few words."""

    def __init__(self, world: "World", rank: int, incarnation: str, prefix: str) -> None:
        self.world = world
        self.rank = rank
        self.prefix = prefix
        self.process = pb.Process(rank=rank, incarnation=incarnation, host=f"node-{rank}", pid=rank + 1)
        self.pipe: Pipe | None = None
        self.welcomed = False
        self.position: int | None = None
        self.turn: Turn | None = None
        self.over = ""
        """Why it is dead, or was sent away."""
        self.leaving = False

    def __repr__(self) -> str:
        return f"{self.process.incarnation}({self.rank})"

    def connect(self, via: "RelayNode | None") -> None:
        self.welcomed = False
        self.pipe = self.world.open(self, via)
        self._say(hello=pb.Hello(run_id=RUN, processes=[self.process], protocol_version=1))

    def arrive(self, failure: str | None) -> None:
        assert self.position is not None
        self.turn = Turn(self.position, failure, self.world.now)
        self.world.arrived.setdefault((self.prefix, self.position), set()).add(self.process.incarnation)
        if self.welcomed:
            self._say_arrival()

    def goodbye(self) -> None:
        self.leaving = True
        if self.welcomed:
            self._say(goodbye=pb.Goodbye(reason="done"))

    def die(self) -> None:
        self.over = "killed"
        if self.pipe is not None:
            self.pipe.client_gone = True
            self.pipe.down.clear()

    def _say(self, **message: object) -> None:
        if self.pipe is not None:
            self.pipe.say(pb.ConnectRequest(**message).SerializeToString())  # type: ignore[arg-type]

    def _say_arrival(self) -> None:
        assert self.turn is not None
        arrival = pb.Arrival(rank=self.rank, failure=self.turn.failure)
        waited_ms = round((self.world.now - self.turn.since) * 1000)
        self._say(
            arrive=pb.Arrive(
                prefix=self.prefix,
                sequence=self.turn.sequence,
                timeout_ms=round(TIMEOUT * 1000),
                arrivals=[arrival],
                waited_ms=waited_ms,
            )
        )

    def heard(self, data: bytes) -> None:
        response = pb.ConnectResponse.FromString(data)
        match response.WhichOneof("message"):
            case "welcome":
                (self.process.ordinal,) = response.welcome.ordinals
                self.welcomed = True
                if self.leaving:
                    self._say(goodbye=pb.Goodbye(reason="done"))
                    return
                self._say(join_group=pb.JoinGroup(prefix=self.prefix, world_size=self.world.size))
                if self.turn is not None:
                    self._say_arrival()
            case "group_joined":
                (position,) = response.group_joined.positions
                assert position.rank == self.rank, "a place of another rank"
                if self.position is None:
                    self.position = position.sequence
            case "decision":
                self._decided(response.decision)
            case "refusal":
                self._refused(response.refusal)

    def _decided(self, decision: common_pb2.Decision) -> None:
        self.world.heard(self, decision)
        if self.turn is not None and (decision.prefix, decision.sequence) == (
            self.prefix,
            self.turn.sequence,
        ):
            self.turn = None
            self.position = decision.sequence + 1

    def _refused(self, refusal: pb.Refusal) -> None:
        assert not refusal.HasField("rank") or refusal.rank == self.rank, "a refusal of another rank"
        reason = str(info_of(refusal).reason)
        if not refusal.prefix:
            if reason not in ("SESSION_REPLACED", "UPSTREAM_LOST"):
                self.over = reason
        elif refusal.HasField("sequence"):
            if self.turn is not None and self.turn.sequence == refusal.sequence:
                self.turn, self.over = None, reason
        else:
            self.over = reason

    def ended(self, refusal: pb.Refusal | None) -> None:
        self.pipe, self.welcomed = None, False
        if self.leaving and refusal is None:
            self.over = self.over or "left"


class World:
    """A coordinator, relays and workers.

    Args:
        size: of the world.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.now = 100.0
        self.coordinator = Coordinator(session_ttl=TTL)
        self.sessions: dict[int, AtCoordinator] = {}
        self.pipes: list[Pipe] = []
        self.workers: list[Worker] = []
        first = RelayNode(self, "node-0:1", None)
        self.relays = [first, RelayNode(self, "node-1:1", None), RelayNode(self, "node-2:1", first)]
        self.arrived: dict[tuple[str, int], set[str]] = {}
        """The incarnations that have sent an arrival, by group and sequence."""
        self.decisions: dict[tuple[str, int], common_pb2.Decision] = {}
        self.released: dict[tuple[str, int, int], str] = {}
        """Which incarnation was told of a release, by group, sequence and rank."""
        self.decided: dict[tuple[str, int], int] = {}
        """The coordinator's own outcomes."""
        self._last_session = 0
        self._last_incarnation = 0

    def worker(self, rank: int, prefix: str, via: RelayNode | None) -> Worker:
        self._last_incarnation += 1
        worker = Worker(self, rank, f"process-{self._last_incarnation}", prefix)
        self.workers.append(worker)
        worker.connect(via)
        return worker

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.over]

    def open(self, client: Client, via: RelayNode | None) -> Pipe:
        pipe = Pipe(client)
        if via is None:
            self._last_session += 1
            end = AtCoordinator(self, pipe, self._last_session)
            self.sessions[self._last_session] = end
            pipe.server = end
        else:
            pipe.server = via.take(pipe)
        self.pipes.append(pipe)
        return pipe

    # ------------------------------------------------------------------ the coordinator

    def step(self, event: Event) -> None:
        effects = Effects()
        self.coordinator.step(event, Instant(self.now, self.now), effects)
        for decision in effects.decisions:
            key = decision.prefix, decision.sequence
            assert key not in self.decided, "decided twice"
            self.decided[key] = int(decision.outcome)
        for audience, message in effects.deliveries:
            data = codec.encode_session_message(message)
            for session, ranks in audience.items():
                end = self.sessions.get(session)
                if end is not None:
                    end.deliver(message, data + codec.encode_ranks(ranks) if ranks else data)

    def pass_time(self, seconds: float) -> None:
        until = self.now + seconds
        while (due := self.coordinator.next_deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.step(Tick())
        self.now = until

    # ------------------------------------------------------------------ the rules

    def heard(self, worker: Worker, decision: common_pb2.Decision) -> None:
        key = decision.prefix, decision.sequence
        assert decision.prefix == worker.prefix
        assert self.decided[key] == decision.outcome, "told what was not decided"
        before = self.decisions.setdefault(key, decision)
        assert before.message == decision.message, "invariant 1 (one decision per barrier): there are two"
        if decision.outcome == common_pb2.OUTCOME_RELEASED:
            incarnation = worker.process.incarnation
            assert incarnation in self.arrived.get(key, set()), (
                "invariant 12 (the coordinator assigns the sequence)"
            )
            first = self.released.setdefault((*key, worker.rank), incarnation)
            assert first == incarnation, "invariant 11 (the newer fences the older)"

    # ------------------------------------------------------------------ the network

    def busy(self) -> Iterator[Pipe]:
        self.pipes = [pipe for pipe in self.pipes if not (pipe.client_gone and pipe.server_gone)]
        return (pipe for pipe in self.pipes if not pipe.idle)

    def settle(self) -> None:
        """Deliver all, whatever it leads to."""
        for _ in range(10_000):
            quiet = True
            for pipe in list(self.pipes):
                if pipe.client_gone and not pipe.server_gone:
                    while pipe.up:
                        pipe.deliver_up()
                    pipe.break_server()
                    quiet = False
                while pipe.up and not pipe.server_gone:
                    pipe.deliver_up()
                    quiet = False
                while pipe.down and not pipe.client_gone:
                    pipe.deliver_down()
                    quiet = False
            for relay in self.relays:
                if relay.timers.waiting:
                    relay.timers.fire()
                    quiet = False
            list(self.busy())
            if quiet:
                return
        raise AssertionError("it never comes to rest")


def as_pb(refusal: Refusal) -> pb.Refusal:
    return pb.Refusal(
        code=errors.code(refusal), message=refusal.message, error_info=errors.error_info(refusal)
    )
