"""A simulated process that speaks for one rank, and behaves as the SDK does."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from muster.service.core.vocabulary.effects import GroupJoined, Message, Progress, Refused, SaveAsked, Welcome
from muster.service.core.vocabulary.events import (
    Arrival,
    Arrive,
    Goodbye,
    Hello,
    JoinGroup,
    ProcessInfo,
    Stepped,
    WriteReport,
)
from muster.service.core.vocabulary.model import Closed, Decision, Outcome, Ranks, Shape
from muster.service.core.vocabulary.records import GroupRecord, SaveRecord
from muster.service.core.vocabulary.refusal import Reason
from tests.support.world import history
from tests.support.world.relay_stream import RelayStream

if TYPE_CHECKING:
    from tests.support.world.core_world import World

CKPT = "checkpoint"
TIMEOUT = 300.0


@dataclass(eq=False)
class GroupMembership:
    """A client's place in one group."""

    shape: Shape
    position: int | None = None
    era: int | None = None
    """The group's era when it joined last."""
    waiting: bool = False
    payload: bytes = b""
    failure: str | None = None
    report: WriteReport | None = None
    timeout: float = TIMEOUT
    progress_after: float = 0.0
    sent_at: float = 0.0
    """When its arrival was first sent."""
    refused: Reason | None = None
    heard: list[Decision] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)


class Client:
    """One process that speaks for one rank, as the SDK does it."""

    def __init__(self, world: "World", rank: int, *, run: str, generation: int, incarnation: str) -> None:
        self.began = world.now
        self.world = world
        self.rank = rank
        self.run = run
        self.generation = generation
        self.incarnation = incarnation
        self.host = f"node-{rank // 8}"
        self.pid = 4000 + world.count()
        self.ordinal = 0
        self.welcomed_at: float | None = None
        """When it was welcomed last."""
        self.session: int | None = None
        self.broken_session: int | None = None
        """A stream that is gone, of which the coordinator does not know yet."""
        self.line: RelayStream | None = None
        """The relay's stream that it rides on; its session is that."""
        self.broken_line: RelayStream | None = None
        """One that it rode on, whose relay does not know yet that it has gone."""
        self.alive = True
        self.seats: dict[str, GroupMembership] = {}
        self.refusals: list[Refused] = []
        self.closed: list[Closed] = []
        self.save_asked: SaveAsked | None = None
        """The save that it heard of last."""
        self.save_asked_at = 0.0
        """When it heard of that."""

    def __repr__(self) -> str:
        return f"<{self.incarnation} of rank {self.rank}, generation {self.generation}>"

    @property
    def info(self) -> ProcessInfo:
        age = self.world.now - self.began
        return ProcessInfo(self.rank, self.incarnation, self.host, self.pid, self.ordinal, age=age)

    @property
    def life(self) -> history.Life:
        return history.Life(self.run, self.rank, self.incarnation, self.generation, self.ordinal)

    # ------------------------------------------------------------------ what it does

    def connect(self, line: RelayStream | None = None) -> None:
        """Say hello, perhaps through a relay; join again where it was, and arrive again where it waits."""
        assert self.alive
        assert self.session is None
        if line is not None:
            line.enter(self)
        else:
            self.session = self.world.open_session(self)
            self.world.do(Hello(self.session, self.run, self.generation, (self.info,)))
        self.resume()

    def resume(self) -> None:
        """Join again where it was, and arrive again where it waits."""
        for prefix, seat in self.seats.items():
            if self.session is not None:
                self._join(prefix)
            if self.session is not None and seat.waiting and seat.refused is None:
                self._arrive(prefix)

    def join(self, prefix: str = CKPT, world_size: int = 0, participants: tuple[int, ...] = ()) -> int | None:
        """Take part in a group. Returns its position there."""
        size = world_size or self.world.world_size
        self.seats.setdefault(prefix, GroupMembership(Shape(size, Ranks(participants))))
        self._join(prefix)
        return self.seats[prefix].position

    def _join(self, prefix: str) -> None:
        assert self.session is not None
        shape = self.seats[prefix].shape
        ranks = (self.rank,) if self.line is not None else ()
        self.world.do(JoinGroup(self.session, prefix, shape.world_size, shape.participants, ranks))

    def arrive(
        self,
        prefix: str = CKPT,
        *,
        payload: bytes = b"",
        failure: str | None = None,
        timeout: float = TIMEOUT,
        progress_after: float = 0.0,
        report: WriteReport | None = None,
    ) -> Decision | None:
        """Arrive at its position. Returns the decision, if it is there already."""
        if prefix not in self.seats:
            self.join(prefix)
        seat, position = self.seats[prefix], self.seats[prefix].position
        self.about_to_arrive(prefix, payload, failure, timeout, progress_after, report)
        self._arrive(prefix)
        return seat.heard[-1] if seat.heard and seat.heard[-1].sequence == position else None

    def about_to_arrive(
        self,
        prefix: str,
        payload: bytes = b"",
        failure: str | None = None,
        timeout: float = TIMEOUT,
        progress_after: float = 0.0,
        report: WriteReport | None = None,
    ) -> None:
        """What it will say, again and again, until it has heard."""
        seat = self.seats[prefix]
        assert seat.position is not None
        seat.waiting, seat.payload, seat.failure, seat.timeout = True, payload, failure, timeout
        seat.progress_after, seat.report = progress_after, report
        seat.sent_at = self.world.now
        seat.refused = None

    def arrive_again(self, prefix: str = CKPT) -> None:
        """Send the same arrival once more."""
        self._arrive(prefix)

    def _arrive(self, prefix: str) -> None:
        assert self.session is not None
        seat = self.seats[prefix]
        assert seat.position is not None
        self.world.arriving(self, prefix, seat)
        arrival = Arrival(self.rank, seat.payload, seat.failure, seat.report)
        asked = seat.timeout, (arrival,), seat.progress_after, self.world.now - seat.sent_at
        self.world.do(Arrive(self.session, prefix, seat.position, *asked))

    def step(self, number: int) -> None:
        """Tell how far the training has come."""
        assert self.session is not None
        self.world.do(Stepped(self.session, ((self.rank, number),)))

    def goodbye(self) -> None:
        assert self.session is not None
        if self.line is not None:
            self.line.part(self, goodbye="done")
        else:
            self.world.do(Goodbye(self.session))
        self.die()

    def lose_connection(self) -> None:
        """The stream breaks, and both sides see it."""
        self.stream_breaks()
        self.world.coordinator_sees_it(self)

    def stream_breaks(self) -> None:
        """The stream breaks, and the coordinator does not see it yet."""
        if self.line is not None:
            self.broken_line, self.line, self.session = self.line, None, None
        elif self.session is not None:
            self.world.streams.pop(self.session)
            self.broken_session, self.session = self.session, None

    def left_line(self, line: RelayStream) -> None:
        """It rides there no more, and its relay knows it."""
        if self.line is line:
            self.session = self.line = None
        if self.broken_line is line:
            self.broken_line = None

    def die(self) -> None:
        """The process ends; its stream breaks."""
        self.alive = False
        self.lose_connection()

    def reconnect(self) -> None:
        self.lose_connection()
        self.connect()

    # ------------------------------------------------------------------ what it hears

    def hear(self, message: Message) -> None:
        match message:
            case Welcome():
                assert self.ordinal in (0, message.ordinals[0]), "an incarnation keeps its ordinal"
                (self.ordinal,) = message.ordinals
                self.welcomed_at = self.world.now
            case GroupJoined():
                seat = self.seats[message.prefix]
                ((_, start),) = message.positions
                seat.refused = None
                if seat.position is None:
                    seat.position = start
                era = self.world.disk.eras[self.run, message.prefix]
                if seat.era != era:
                    seat.era = era
                    # Who comes back from an earlier era may start at a barrier of that one.
                    group = self.world.disk.kept[GroupRecord, self.run, message.prefix]
                    assert isinstance(group, GroupRecord)
                    first = max(start, group.first_sequence)
                    joined = history.Joined(self.life, message.prefix, first, tuple(seat.shape), era)
                    self.world.history.append(joined)
            case Decision():
                self._hear_decision(message)
            case Progress():
                seat = self.seats[message.prefix]
                assert (seat.waiting, seat.position) == (True, message.sequence)
                seat.progress.append(message)
            case Closed():
                assert self.world.disk.closed(self.run) == message, "it is told before it is on disk"
                self.closed.append(message)
            case SaveAsked():
                kept = self.world.disk.kept[SaveRecord, self.run]
                assert isinstance(kept, SaveRecord)
                assert kept.save.number >= message.number, "it is told before it is on disk"
                self.save_asked, self.save_asked_at = message, self.world.now
            case Refused():
                self._hear_refusal(message)

    def _hear_decision(self, decision: Decision) -> None:
        seat = self.seats[decision.prefix]
        payloads = {rank: payload.decode() for rank, payload in decision.payloads}
        missing = tuple(one.rank for one in decision.missing)
        self.world.history.append(
            history.Heard(
                self.life,
                decision.prefix,
                decision.sequence,
                decision.outcome.name,
                decision.message,
                missing,
                payloads,
            )
        )
        if decision.sequence == seat.position:
            assert seat.waiting, "it is told of a barrier that it has not arrived at"
            seat.position += 1
            seat.waiting = False
            seat.heard.append(decision)

    def _hear_refusal(self, refused: Refused) -> None:
        assert refused.refusal.message
        self.refusals.append(refused)
        if refused.prefix in self.seats:
            seat = self.seats[refused.prefix]
            seat.refused, seat.waiting = refused.refusal.reason, False
            self._go_on_after(refused, seat)
        if refused.final:
            for seat in self.seats.values():
                seat.refused, seat.waiting = refused.refusal.reason, False
            self.lose_connection()

    def _go_on_after(self, refused: Refused, seat: GroupMembership) -> None:
        """Go on at another barrier, if the coordinator has no outcome of this one for the process."""
        if refused.refusal.reason is Reason.SEQUENCE_BEHIND:
            start = int(refused.refusal.metadata["start_sequence"])
        elif refused.refusal.reason is Reason.SEQUENCE_FORGOTTEN:
            start = int(refused.refusal.metadata["next_sequence"])
        else:
            return
        seat.position = start
        self.world.history.append(history.MovedOn(self.life, refused.prefix, start))

    # ------------------------------------------------------------------ for assertions

    def arrived_at(self, prefix: str, sequence: int) -> bool:
        """Whether it arrived at a barrier itself."""
        return (self.life, prefix, sequence) in self.world.arrived

    @property
    def outcomes(self) -> list[Outcome]:
        """What it heard in the checkpoint group, in order."""
        return [decision.outcome for decision in self.seats[CKPT].heard]

    @property
    def last(self) -> Decision:
        return self.seats[CKPT].heard[-1]

    @property
    def reason(self) -> Reason:
        """The reason of the last refusal."""
        return self.refusals[-1].refusal.reason
