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
    """A client's membership of one group."""

    shape: Shape
    position: int | None = None
    resets: int | None = None
    """How often the group had been created or reset when the client joined last."""
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
        self.relay_stream: RelayStream | None = None
        """The relay's stream that it uses. Its session is the session of that stream."""
        self.broken_relay_stream: RelayStream | None = None
        """The stream that it used before, if the relay does not know yet that it has gone."""
        self.alive = True
        self.memberships: dict[str, GroupMembership] = {}
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
    def rank_process(self) -> history.RankProcess:
        return history.RankProcess(self.run, self.rank, self.incarnation, self.generation, self.ordinal)

    # ------------------------------------------------------------------ what it does

    def connect(self, stream: RelayStream | None = None) -> None:
        """Say hello, perhaps through a relay; join again where it was, and arrive again where it waits."""
        assert self.alive
        assert self.session is None
        if stream is not None:
            stream.add_processes(self)
        else:
            self.session = self.world.open_session(self)
            self.world.do(Hello(self.session, self.run, self.generation, (self.info,)))
        self.resume()

    def resume(self) -> None:
        """Join again where it was, and arrive again where it waits."""
        for prefix, membership in self.memberships.items():
            if self.session is not None:
                self._join(prefix)
            if self.session is not None and membership.waiting and membership.refused is None:
                self._arrive(prefix)

    def join(self, prefix: str = CKPT, world_size: int = 0, participants: tuple[int, ...] = ()) -> int | None:
        """Take part in a group. Returns its position there."""
        size = world_size or self.world.world_size
        self.memberships.setdefault(prefix, GroupMembership(Shape(size, Ranks(participants))))
        self._join(prefix)
        return self.memberships[prefix].position

    def _join(self, prefix: str) -> None:
        assert self.session is not None
        shape = self.memberships[prefix].shape
        ranks = (self.rank,) if self.relay_stream is not None else ()
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
        if prefix not in self.memberships:
            self.join(prefix)
        membership, position = self.memberships[prefix], self.memberships[prefix].position
        self.about_to_arrive(prefix, payload, failure, timeout, progress_after, report)
        self._arrive(prefix)
        return (
            membership.heard[-1] if membership.heard and membership.heard[-1].sequence == position else None
        )

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
        membership = self.memberships[prefix]
        assert membership.position is not None
        membership.waiting, membership.payload, membership.failure, membership.timeout = (
            True,
            payload,
            failure,
            timeout,
        )
        membership.progress_after, membership.report = progress_after, report
        membership.sent_at = self.world.now
        membership.refused = None

    def arrive_again(self, prefix: str = CKPT) -> None:
        """Send the same arrival once more."""
        self._arrive(prefix)

    def _arrive(self, prefix: str) -> None:
        assert self.session is not None
        membership = self.memberships[prefix]
        assert membership.position is not None
        self.world.arriving(self, prefix, membership)
        arrival = Arrival(self.rank, membership.payload, membership.failure, membership.report)
        asked = membership.timeout, (arrival,), membership.progress_after, self.world.now - membership.sent_at
        self.world.do(Arrive(self.session, prefix, membership.position, *asked))

    def step(self, number: int) -> None:
        """Tell how far the training has come."""
        assert self.session is not None
        self.world.do(Stepped(self.session, ((self.rank, number),)))

    def goodbye(self) -> None:
        assert self.session is not None
        if self.relay_stream is not None:
            self.relay_stream.remove_processes(self, goodbye="done")
        else:
            self.world.do(Goodbye(self.session))
        self.die()

    def lose_connection(self) -> None:
        """The stream breaks, and both sides see it."""
        self.stream_breaks()
        self.world.coordinator_sees_it(self)

    def stream_breaks(self) -> None:
        """The stream breaks, and the coordinator does not see it yet."""
        if self.relay_stream is not None:
            self.broken_relay_stream, self.relay_stream, self.session = self.relay_stream, None, None
        elif self.session is not None:
            self.world.streams.pop(self.session)
            self.broken_session, self.session = self.session, None

    def leave_relay_stream(self, stream: RelayStream) -> None:
        """Leave a relay's stream, after the relay has noticed it."""
        if self.relay_stream is stream:
            self.session = self.relay_stream = None
        if self.broken_relay_stream is stream:
            self.broken_relay_stream = None

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
                membership = self.memberships[message.prefix]
                ((_, start),) = message.positions
                membership.refused = None
                if membership.position is None:
                    membership.position = start
                resets = self.world.disk.resets[self.run, message.prefix]
                if membership.resets != resets:
                    membership.resets = resets
                    # A client from before the reset may start at an older barrier.
                    group = self.world.disk.kept[GroupRecord, self.run, message.prefix]
                    assert isinstance(group, GroupRecord)
                    first = max(start, group.first_sequence)
                    joined = history.Joined(
                        self.rank_process, message.prefix, first, tuple(membership.shape), resets
                    )
                    self.world.history.append(joined)
            case Decision():
                self._hear_decision(message)
            case Progress():
                membership = self.memberships[message.prefix]
                assert (membership.waiting, membership.position) == (True, message.sequence)
                membership.progress.append(message)
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
        membership = self.memberships[decision.prefix]
        payloads = {rank: payload.decode() for rank, payload in decision.payloads}
        missing = tuple(one.rank for one in decision.missing)
        self.world.history.append(
            history.Heard(
                self.rank_process,
                decision.prefix,
                decision.sequence,
                decision.outcome.name,
                decision.message,
                missing,
                payloads,
            )
        )
        if decision.sequence == membership.position:
            assert membership.waiting, "it is told of a barrier that it has not arrived at"
            membership.position += 1
            membership.waiting = False
            membership.heard.append(decision)

    def _hear_refusal(self, refused: Refused) -> None:
        assert refused.refusal.message
        self.refusals.append(refused)
        if refused.prefix in self.memberships:
            membership = self.memberships[refused.prefix]
            membership.refused, membership.waiting = refused.refusal.reason, False
            self._go_on_after(refused, membership)
        if refused.final:
            for membership in self.memberships.values():
                membership.refused, membership.waiting = refused.refusal.reason, False
            self.lose_connection()

    def _go_on_after(self, refused: Refused, membership: GroupMembership) -> None:
        """Go on at another barrier, if the coordinator has no outcome of this one for the process."""
        if refused.refusal.reason is Reason.SEQUENCE_BEHIND:
            start = int(refused.refusal.metadata["start_sequence"])
        elif refused.refusal.reason is Reason.SEQUENCE_FORGOTTEN:
            start = int(refused.refusal.metadata["next_sequence"])
        else:
            return
        membership.position = start
        self.world.history.append(history.MovedOn(self.rank_process, refused.prefix, start))

    # ------------------------------------------------------------------ for assertions

    def arrived_at(self, prefix: str, sequence: int) -> bool:
        """Whether it arrived at a barrier itself."""
        return (self.rank_process, prefix, sequence) in self.world.arrived

    @property
    def outcomes(self) -> list[Outcome]:
        """What it heard in the checkpoint group, in order."""
        return [decision.outcome for decision in self.memberships[CKPT].heard]

    @property
    def last(self) -> Decision:
        return self.memberships[CKPT].heard[-1]

    @property
    def reason(self) -> Reason:
        """The reason of the last refusal."""
        return self.refusals[-1].refusal.reason
