"""A line with nothing above and nobody below it: what is said and told is kept."""

from collections.abc import Callable
from dataclasses import dataclass, field

from muster.relay.counts import Counts
from muster.relay.guest import Guest
from muster.relay.line import Line
from muster.relay.relay import Relay
from muster.v1 import session_pb2 as pb

WELCOME = pb.Welcome(epoch=1, session_ttl_ms=10_000, max_payload_bytes=100, coordinator_version="1")


@dataclass
class Timers:
    """A clock that stands still until it is told to go on."""

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


class Above:
    """The coordinator's end of a line; a test answers for it."""

    def __init__(self, run_id: str, generation: int, over: Callable[[Line], None], house: "House") -> None:
        self.said: list[pb.ConnectRequest] = []
        self.line = Line(
            run_id,
            generation,
            say=self._say,
            after=house.timers.after,
            over=over,
            counts=house.counts,
        )

    def _say(self, request: pb.ConnectRequest) -> None:
        said = pb.ConnectRequest()
        said.CopyFrom(request)
        self.said.append(said)

    def take(self) -> list[pb.ConnectRequest]:
        """What was said since the last look."""
        said, self.said = self.said, []
        return said

    def kinds(self) -> list[str | None]:
        return [request.WhichOneof("message") for request in self.take()]

    def hear(self, **message: object) -> None:
        self.line.hear(pb.ConnectResponse(**message).SerializeToString())  # type: ignore[arg-type]

    def welcome(self) -> None:
        self.hear(welcome=WELCOME)

    def let_in(self, *ordinals: int) -> None:
        self.hear(entered=pb.Entered(entries=[pb.Entry(ordinal=one) for one in ordinals]))


class House:
    """A relay, its lines' other ends, and its clock."""

    def __init__(self) -> None:
        self.timers = Timers()
        self.counts = Counts()
        self.aboves: list[Above] = []
        self.relay = Relay(self._open, lambda: ["coordinator:7550"], "test")

    def _open(self, run_id: str, generation: int, over: Callable[[Line], None]) -> Line:
        above = Above(run_id, generation, over, self)
        self.aboves.append(above)
        return above.line

    @property
    def above(self) -> Above:
        """The other end of the newest line."""
        return self.aboves[-1]

    def stream(self, refused_runs: tuple[str, ...] = ()) -> "Below":
        return Below(self, refused_runs)

    def worker(self, rank: int, incarnation: str = "", run_id: str = "job") -> "Below":
        """A worker that says hello."""
        below = self.stream()
        below.say(hello=hello(rank, incarnation=incarnation or f"life-{rank}", run_id=run_id))
        return below

    def workers(self, *ranks: int) -> list["Below"]:
        """Workers that the coordinator has let in, and that have joined the group ``checkpoint``."""
        all_of_them = [self.worker(rank) for rank in ranks]
        if self.above.line.welcome is None:
            self.above.welcome()
        self.timers.fire()
        self.above.let_in(*(100 + rank for rank in ranks))
        for one in all_of_them:
            one.say(join_group=pb.JoinGroup(prefix="checkpoint", world_size=64))
        self.timers.fire()
        positions = [pb.Position(rank=rank, sequence=0) for rank in ranks]
        self.above.hear(group_joined=pb.GroupJoined(prefix="checkpoint", positions=positions))
        self.above.take()
        for one in all_of_them:
            one.take()
        return all_of_them


class Below:
    """A stream from below, and what it was told."""

    def __init__(self, house: House, refused_runs: tuple[str, ...] = ()) -> None:
        self.told: list[pb.ConnectResponse] = []
        self.over = False
        self.ending: pb.Refusal | None = None
        self._refused_runs = refused_runs
        self.guest: Guest = house.relay.guest(self, self._check_run)

    def _check_run(self, run_id: str) -> None:
        from muster.relay.refusals import invalid

        if run_id in self._refused_runs:
            raise invalid("run_id", run_id, "it is not for this token")

    def send(self, data: bytes, own: bytes = b"") -> None:
        assert not self.over, "something is said after the end"
        self.told.append(pb.ConnectResponse.FromString(data + own))

    def end(self, refusal: pb.Refusal | None) -> None:
        assert not self.over, "the stream is ended twice"
        self.over, self.ending = True, refusal

    def say(self, **message: object) -> None:
        self.guest.hear(pb.ConnectRequest(**message).SerializeToString())  # type: ignore[arg-type]

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
        told, self.told = self.told, []
        return told

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
