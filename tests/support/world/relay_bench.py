"""A relay without a coordinator and workers: a test plays both ends, and reads what the relay sends."""

from collections.abc import Callable
from dataclasses import dataclass, field

from muster.relay.downstream_stream import DownstreamStream
from muster.relay.router import StreamRouter
from muster.relay.stats import RelayStats
from muster.relay.upstream_stream import UpstreamStream
from muster.serving.outbox import Outbox
from muster.v1 import session_pb2 as pb

WELCOME = pb.Welcome(epoch=1, session_ttl_ms=10_000, max_payload_bytes=100, coordinator_version="1")


@dataclass
class Timers:
    """Timers that fire when a test says so."""

    waiting: list[tuple[float, Callable[[], None]]] = field(default_factory=list)

    def after(self, seconds: float, call: Callable[[], None]) -> "Handle":
        handle = Handle(self, (seconds, call))
        self.waiting.append(handle.entry)
        return handle

    def fire(self) -> None:
        waiting, self.waiting = self.waiting, []
        for _, call in waiting:
            call()


@dataclass
class Handle:
    timers: Timers
    entry: tuple[float, Callable[[], None]]

    def cancel(self) -> None:
        if self.entry in self.timers.waiting:
            self.timers.waiting.remove(self.entry)


class UpstreamEnd:
    """The coordinator's end of an upstream stream; a test answers for it."""

    def __init__(
        self, run_id: str, generation: int, on_closed: Callable[[UpstreamStream], None], bench: "RelayBench"
    ) -> None:
        self.stream = UpstreamStream(
            run_id,
            generation,
            outbox=Outbox(),
            call_later=bench.timers.after,
            on_closed=on_closed,
            stats=bench.stats,
        )

    def take(self) -> list[pb.ConnectRequest]:
        """Return the messages since the last call."""
        sent = []
        while (data := self.stream.outbox.take()) is not None:
            sent.append(pb.ConnectRequest.FromString(data))
        return sent

    def kinds(self) -> list[str | None]:
        return [request.WhichOneof("message") for request in self.take()]

    def answer(self, **message: object) -> None:
        self.stream.receive(pb.ConnectResponse(**message).SerializeToString())  # type: ignore[arg-type]

    def welcome(self) -> None:
        self.answer(welcome=WELCOME)

    def admit(self, *ordinals: int) -> None:
        self.answer(processes_added=pb.ProcessesAdded(entries=[pb.Entry(ordinal=one) for one in ordinals]))


class RelayBench:
    """A relay, the coordinator's ends of its streams, and its timers."""

    def __init__(self) -> None:
        self.timers = Timers()
        self.stats = RelayStats()
        self.upstreams: list[UpstreamEnd] = []
        self.router = StreamRouter(self._open, lambda: ["coordinator:7550"], "test")

    def _open(
        self, run_id: str, generation: int, on_closed: Callable[[UpstreamStream], None]
    ) -> UpstreamStream:
        upstream = UpstreamEnd(run_id, generation, on_closed, self)
        self.upstreams.append(upstream)
        return upstream.stream

    @property
    def upstream(self) -> UpstreamEnd:
        """The coordinator's end of the newest upstream stream."""
        return self.upstreams[-1]

    def stream(self, refused_runs: tuple[str, ...] = ()) -> "DownstreamEnd":
        return DownstreamEnd(self, refused_runs)

    def worker(self, rank: int, incarnation: str = "", run_id: str = "job") -> "DownstreamEnd":
        """Connect a worker, which sends its Hello."""
        below = self.stream()
        below.say(hello=hello(rank, incarnation=incarnation or f"life-{rank}", run_id=run_id))
        return below

    def workers(self, *ranks: int) -> list["DownstreamEnd"]:
        """Connect workers, admit them, and let them join the group ``checkpoint``."""
        workers = [self.worker(rank) for rank in ranks]
        if self.upstream.stream.welcome is None:
            self.upstream.welcome()
        self.timers.fire()
        self.upstream.admit(*(100 + rank for rank in ranks))
        for one in workers:
            one.say(join_group=pb.JoinGroup(prefix="checkpoint", world_size=64))
        self.timers.fire()
        positions = [pb.Position(rank=rank, sequence=0) for rank in ranks]
        self.upstream.answer(group_joined=pb.GroupJoined(prefix="checkpoint", positions=positions))
        self.upstream.take()
        for one in workers:
            one.take()
        return workers


class DownstreamEnd:
    """A worker's or another relay's end of a downstream stream, and what it has received."""

    def __init__(self, bench: RelayBench, refused_runs: tuple[str, ...] = ()) -> None:
        self.received: list[pb.ConnectResponse] = []
        self.over = False
        self.ending: pb.Refusal | None = None
        self._refused_runs = refused_runs
        self.stream = DownstreamStream(bench.router, self, self._check_run)

    def _check_run(self, run_id: str) -> None:
        from muster.relay.refusals import invalid

        if run_id in self._refused_runs:
            raise invalid("run_id", run_id, "it is not for this token")

    def send(self, data: bytes, own: bytes = b"") -> None:
        assert not self.over, "a message after the end"
        self.received.append(pb.ConnectResponse.FromString(data + own))

    def end(self, refusal: pb.Refusal | None) -> None:
        assert not self.over, "the stream is ended twice"
        self.over, self.ending = True, refusal

    def say(self, **message: object) -> None:
        self.stream.receive(pb.ConnectRequest(**message).SerializeToString())  # type: ignore[arg-type]

    def arrive(self, rank: int, sequence: int = 0, failure: str | None = None, **more: object) -> None:
        payload, write = more.pop("payload", b""), more.pop("write", None)
        arrival = pb.Arrival(rank=rank, payload=payload, failure=failure, write=write)  # type: ignore[arg-type]
        prefix = str(more.pop("prefix", "checkpoint"))
        timeout_ms = int(str(more.pop("timeout_ms", 1000)))
        self.say(
            arrive=pb.Arrive(
                prefix=prefix,
                sequence=sequence,
                timeout_ms=timeout_ms,
                arrivals=[arrival],
                **more,  # type: ignore[arg-type]
            )
        )

    def take(self) -> list[pb.ConnectResponse]:
        received, self.received = self.received, []
        return received

    def kinds(self) -> list[str | None]:
        return [response.WhichOneof("message") for response in self.take()]


def hello(
    *ranks: int, incarnation: str = "", run_id: str = "job", relay: str = "", version: int = 1
) -> pb.Hello:
    return pb.Hello(
        run_id=run_id,
        generation=0,
        processes=[process(rank, incarnation) for rank in ranks],
        protocol_version=version,
        relay=relay,
    )


def process(rank: int, incarnation: str = "") -> pb.Process:
    return pb.Process(rank=rank, incarnation=incarnation or f"life-{rank}", host="node-0", pid=4000 + rank)


def decision(prefix: str = "checkpoint", sequence: int = 0) -> dict[str, object]:
    from muster.v1 import common_pb2

    return {"decision": common_pb2.Decision(prefix=prefix, sequence=sequence)}
