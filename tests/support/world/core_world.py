"""A world around the core, without sockets: a disk, streams, client processes and crashes.

``World`` feeds events to a :class:`Coordinator`, puts the records of each step on a "disk" (a dict) and then
delivers. It can crash between any two of these. ``Client`` behaves as the SDK does: it takes its position
from its first join, arrives there, sends everything again after a reconnect, and goes on when it has heard.

The world holds a few promises of the design by itself, at every step of every test: nothing is told that is
not on disk, by invariant 2 (durable before delivered); a stored decision never changes, by invariant 1 (one
decision per barrier); sequences have no gaps, by invariant 12 (the coordinator assigns the sequence); and the
missing are exactly the ranks that have not arrived, by invariant 5 (every rank learns all missing ranks). It
also holds that what the core counts is what it would find by looking at every process.
"""

import dataclasses
import enum
import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from muster.service.core.barriers.group import Group
from muster.service.core.coordinator import Coordinator
from muster.service.core.retention.retention import FOR_EVER, Retention
from muster.service.core.vocabulary.effects import (
    CheckpointsRecord,
    Delivery,
    Effects,
    Entered,
    EvictionRecord,
    ForgetDecision,
    ForgetParticipant,
    ForgetRankOwner,
    ForgetRound,
    ForgetRun,
    ForgetShape,
    ForgetStoreKey,
    ForgetStoreOperation,
    GroupJoined,
    GroupRecord,
    Message,
    ParticipantRecord,
    Progress,
    RankOwnerRecord,
    Record,
    Refused,
    RoundRecord,
    RunRecord,
    SaveAsked,
    SaveRecord,
    ShapeRecord,
    StoredRecord,
    StoreKeyRecord,
    StoreOperationRecord,
    Welcome,
)
from muster.service.core.vocabulary.events import (
    Abort,
    Arrival,
    Arrive,
    ArriveOnce,
    Disconnected,
    Enter,
    Event,
    Evict,
    Goodbye,
    Hello,
    JoinGroup,
    ProcessInfo,
    Stepped,
    Tick,
    WriteReport,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Closed, Decision, Instant, Outcome, Ranks, Shape
from muster.service.core.vocabulary.refusal import Reason
from tests.support.world import history
from tests.support.world.core_lines import Line

T = TypeVar("T")

RUN = "job1"
CKPT = "checkpoint"
TTL = 10.0
TIMEOUT = 300.0
WALL = 1_700_000_000.0


class Crash(enum.Enum):
    """When the coordinator dies within a step."""

    BEFORE_PERSIST = enum.auto()
    """The step never happened, and nobody was told."""
    AFTER_PERSIST = enum.auto()
    """It is on disk, and nobody was told."""


class Disk:
    """The records as a storage engine keeps them, by key."""

    def __init__(self) -> None:
        self.kept: dict[tuple[object, ...], StoredRecord] = {}
        self.decided: dict[tuple[str, str], list[Decision]] = {}
        """Every decision that was ever on disk, by group."""
        self.eras: Counter[tuple[str, str]] = Counter()
        """How often each group was begun, or taken anew."""
        self.rounds: dict[str, list[RoundRecord]] = {}
        """Every round that was ever on disk, by run."""
        self.places: set[tuple[str, str, int, int]] = set()
        """Every (run, incarnation, attempt, rank) that was ever on disk."""

    def write(self, records: Iterable[Record]) -> None:
        for record in records:
            match record:
                case ForgetRun():
                    self._forget(record.run_id)
                case ForgetShape():
                    self._drop("shape", (ShapeRecord, record.run_id, record.prefix, record.number))
                case ForgetRankOwner():
                    self.kept.pop((RankOwnerRecord, record.run_id, record.prefix, record.rank), None)
                case ForgetDecision():
                    self._drop("decision", (Decision, record.run_id, record.prefix, record.sequence))
                case ForgetRound():
                    self._drop("round", (RoundRecord, record.run_id, record.round))
                case ForgetParticipant():
                    self._drop("node in a round", (ParticipantRecord, record.run_id, record.incarnation))
                case RunRecord():
                    before = self.kept.get((RunRecord, record.run_id))
                    if isinstance(before, RunRecord) and before.closed is not None:
                        assert record.closed == before.closed, "closed is sticky, and the first one counts"
                    self.kept[RunRecord, record.run_id] = record
                case EvictionRecord():
                    self.kept[EvictionRecord, record.run_id, record.rank] = record
                case RoundRecord():
                    self._keep_round(record)
                case ParticipantRecord():
                    self.kept[ParticipantRecord, record.run_id, record.node.incarnation] = record
                    self.places.add((record.run_id, record.node.incarnation, record.attempt, record.rank))
                case GroupRecord():
                    self.kept[GroupRecord, record.run_id, record.prefix] = record
                    self.eras[record.run_id, record.prefix] += 1
                case ShapeRecord():
                    self.kept[ShapeRecord, record.run_id, record.prefix, record.number] = record
                case RankOwnerRecord():
                    self.kept[RankOwnerRecord, record.run_id, record.prefix, record.rank] = record
                case SaveRecord():
                    self.kept[SaveRecord, record.run_id] = record
                case CheckpointsRecord():
                    self.kept[CheckpointsRecord, record.run_id] = record
                case StoreKeyRecord():
                    self.kept[StoreKeyRecord, record.run_id, record.key] = record
                case ForgetStoreKey():
                    del self.kept[StoreKeyRecord, record.run_id, record.key]
                case StoreOperationRecord():
                    self.kept[StoreOperationRecord, record.run_id, record.client] = record
                case ForgetStoreOperation():
                    del self.kept[StoreOperationRecord, record.run_id, record.client]
                case Decision():
                    decided = self.decided.setdefault((record.run_id, record.prefix), [])
                    assert record.sequence == len(decided), "sequences have no gaps, and are decided once"
                    decided.append(record)
                    self.kept[Decision, record.run_id, record.prefix, record.sequence] = record

    def _drop(self, what: str, key: tuple[object, ...]) -> None:
        assert key in self.kept, f"a {what} is forgotten that is not kept"
        del self.kept[key]

    def _keep_round(self, record: RoundRecord) -> None:
        rounds = self.rounds.setdefault(record.run_id, [])
        assert not rounds or record.round > rounds[-1].round, "no round is numbered twice"
        run = self.kept.get((RunRecord, record.run_id))
        assert not (isinstance(run, RunRecord) and run.closed), "no round is completed in a closed run"
        rounds.append(record)
        self.kept[RoundRecord, record.run_id, record.round] = record

    def _forget(self, run_id: str) -> None:
        assert (RunRecord, run_id) in self.kept, "a run is forgotten that is not kept"
        self.kept = {key: record for key, record in self.kept.items() if key[1] != run_id}
        self.rounds.pop(run_id, None)
        for group in [group for group in self.decided if group[0] == run_id]:
            del self.decided[group]

    def closed(self, run_id: str) -> Closed | None:
        run = self.kept.get((RunRecord, run_id))
        return run.closed if isinstance(run, RunRecord) else None

    def was_written(self, decision: Decision) -> bool:
        decided = self.decided.get((decision.run_id, decision.prefix), [])
        return decision.sequence < len(decided) and decided[decision.sequence] == decision

    def records(self) -> list[StoredRecord]:
        """All of them, in an order that no engine promises."""
        return list(reversed(self.kept.values()))

    def of_kind(self, kind: type[T]) -> list[T]:
        return [record for record in self.kept.values() if isinstance(record, kind)]


@dataclass(eq=False)
class Seat:
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
        self.line: Line | None = None
        """The relay's stream that it rides on; its session is that."""
        self.broken_line: Line | None = None
        """One that it rode on, whose relay does not know yet that it has gone."""
        self.alive = True
        self.seats: dict[str, Seat] = {}
        self.refusals: list[Refused] = []
        self.closed: list[Closed] = []
        self.save_asked: SaveAsked | None = None
        """The save that it heard of last."""

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

    def connect(self, line: Line | None = None) -> None:
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
        self.seats.setdefault(prefix, Seat(Shape(size, Ranks(participants))))
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

    def left_line(self, line: Line) -> None:
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
                self.save_asked = message
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

    def _go_on_after(self, refused: Refused, seat: Seat) -> None:
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
        """Of the last refusal."""
        return self.refusals[-1].refusal.reason


class World:
    """One coordinator and its surroundings, with the time moved by hand."""

    def __init__(
        self,
        world_size: int = 2,
        *,
        limits: Limits | None = None,
        ttl: float = TTL,
        retention: Retention = FOR_EVER,
    ) -> None:
        self.world_size = world_size
        self.now = 1_000.0
        self.limits = limits
        self.retention = retention
        self.ttl = ttl
        self.epoch = 0
        self.disk = Disk()
        self.history: list[history.Event] = []
        self.streams: dict[int, Client] = {}
        self.lines: dict[int, Line] = {}
        self.arrived: set[tuple[history.Life, str, int]] = set()
        """Who arrived where: (life, prefix, sequence)."""
        self.clients: list[Client] = []
        self.crash_next: Crash | None = None
        self.last = Effects()
        """Of the last step."""
        self._sessions = itertools.count(1)
        self._counter = itertools.count()
        self.watching = True
        self._present: dict[tuple[str, str], dict[int, str]] = {}
        """Who has arrived at the open barrier of each group, as an outsider would count it."""
        self._speaking: dict[int, tuple[str, dict[int, str]]] = {}
        """By session: its run, and the incarnations by rank."""
        self.start_coordinator()

    def count(self) -> int:
        return next(self._counter)

    # ------------------------------------------------------------------ the coordinator's life

    def start_coordinator(self) -> None:
        self.epoch += 1
        self.coordinator = Coordinator(
            session_ttl=self.ttl, limits=self.limits, retention=self.retention, epoch=self.epoch
        )
        self.coordinator.restore(self.disk.records(), self.instant)
        self.coordinator.serve(self.instant)
        self._gathered = self.coordinator.gathered.bytes

    def crash(self) -> None:
        """The coordinator is killed and starts again; every stream breaks."""
        for client in list(self.streams.values()):
            client.stream_breaks()
        for line in list(self.lines.values()):
            line.breaks(seen=False)
            line.broken_sessions.clear()
        for client in self.clients:
            client.broken_session = client.broken_line = None
        self._present.clear()
        self.start_coordinator()

    # ------------------------------------------------------------------ stepping

    @property
    def instant(self) -> Instant:
        return Instant(self.now, WALL + self.now)

    def do(self, *events: Event) -> Effects:
        """Feed a batch of events, persist, deliver; or crash on the way, if that was asked for."""
        effects = self.last = Effects()
        for event in events:
            decided, delivered = len(effects.decisions), len(effects.deliveries)
            self.coordinator.step(event, self.instant, effects)
            if self.watching:
                earlier = effects.decisions[:decided]
                self._watch(event, earlier, effects.decisions[decided:], effects.deliveries[delivered:])
        self._check_counts()
        crash, self.crash_next = self.crash_next, None
        if crash is Crash.BEFORE_PERSIST:
            self.crash()
            return effects
        self.disk.write(effects.records)
        if crash is Crash.AFTER_PERSIST:
            self.crash()
            return effects
        for audience, message in effects.deliveries:
            if isinstance(message, Decision):
                assert self.disk.was_written(message), "it is told before it is on disk"
            for session, ranks in audience.items():
                if session in self.streams:
                    assert not ranks, "ranks are for relays"
                    self.streams[session].hear(message)
                elif session in self.lines:
                    self.lines[session].hear(message, ranks)
        return effects

    def _check_counts(self) -> None:
        for run in self.coordinator.runs.values():
            living = [process for process in run.roster if process.state.living]
            assert run.roster.deserted == (not living), "the living are not counted right"
        groups = [group for run in self.coordinator.runs.values() for group in run.groups.values()]
        held = [payload for group in groups if group.open for payload in group.open.payloads.values()]
        held += [
            payload for group in groups for one in group.decisions.values() for _, payload in one.payloads
        ]
        gathered, most = sum(map(len, held)), self.coordinator.limits.max_total_gather_bytes
        assert self.coordinator.gathered.bytes == gathered, "the payloads are not counted right"
        assert gathered <= max(most, self._gathered), "payloads are taken beyond the bound"
        self._gathered = gathered

    def ask(self, event: Event) -> list[Message]:
        """Do it, and return what the event's own session is answered."""
        session = getattr(event, "session", None)
        return [message for sessions, message in self.do(event).deliveries if session in sessions]

    def refused(self, event: Event) -> Refused:
        """Do it, expect one refusal, and return that."""
        (answer,) = self.ask(event)
        assert isinstance(answer, Refused)
        return answer

    def tick(self, at: float | None = None) -> None:
        """The time comes: ``at``, or else the next deadline."""
        deadline = self.coordinator.next_deadline()
        target = at if at is not None else deadline
        assert target is not None
        self.now = max(self.now, target)
        self.do(Tick())

    def wait(self, seconds: float) -> None:
        """Time passes, with a tick at every deadline on the way."""
        end = self.now + seconds
        while (deadline := self.coordinator.next_deadline()) is not None and deadline <= end:
            self.tick()
        self.now = end

    # ------------------------------------------------------------------ clients

    def open_session(self, client: Client) -> int:
        session = next(self._sessions)
        self.streams[session] = client
        return session

    def new_session(self) -> int:
        """A stream that no client reads."""
        return next(self._sessions)

    def coordinator_sees_it(self, client: Client) -> None:
        """It finds out about the client's broken stream."""
        session, client.broken_session = client.broken_session, None
        if session is not None:
            self.do(Disconnected(session))
        if client.broken_line is not None:
            client.broken_line.part(client)

    def line(self, *clients: Client, generation: int = 0, name: str = "node-0 (pid 70)") -> Line:
        """A relay's stream on which these ride, who hold no other."""
        line = Line(self, RUN, generation, name)
        line.enter(*clients)
        return line

    def evict(self, rank: int, reason: str = "", *, run: str = RUN) -> Message:
        """An operator sends a rank's processes away."""
        (answer,) = self.ask(Evict(self.new_session(), run, rank, reason))
        return answer

    def start(
        self, rank: int, *, generation: int = 0, run: str = RUN, incarnation: str = "", connect: bool = True
    ) -> Client:
        """Start a process, by default with its stream open."""
        incarnation = incarnation or f"p{self.count()}"
        client = Client(self, rank, run=run, generation=generation, incarnation=incarnation)
        self.clients.append(client)
        if connect:
            client.connect()
        return client

    def ranks(self, count: int | None = None, *, prefix: str = CKPT, generation: int = 0) -> list[Client]:
        """Start ranks 0 to ``count``, all joined."""
        clients = [self.start(rank, generation=generation) for rank in range(count or self.world_size)]
        for client in clients:
            client.join(prefix)
        return clients

    def call(self, rank: int, sequence: int | None = None, prefix: str = CKPT) -> int:
        """A unary call, as people make it with grpcurl. Returns its session."""
        event = self.arrive_once(rank, sequence=sequence, prefix=prefix)
        self.do(event)
        return event.session

    def arrive_once(self, rank: int, **changes: Any) -> ArriveOnce:
        """The event of a unary call."""
        event = ArriveOnce(
            session=self.new_session(),
            run_id=RUN,
            generation=0,
            process=ProcessInfo(rank, f"unary-{rank}", "laptop", 1),
            prefix=CKPT,
            world_size=self.world_size,
            participants=(),
            sequence=None,
            timeout=TIMEOUT,
            arrival=Arrival(rank),
        )
        return dataclasses.replace(event, **changes)

    def hang_up(self, call: int) -> None:
        """The unary call ends."""
        self.do(Disconnected(call))

    def group(self, prefix: str = CKPT, run: str = RUN) -> Group:
        return self.coordinator.runs[run].groups[prefix]

    def abort(self, prefix: str = CKPT, reason: str = "", sequence: int | None = None) -> Message:
        """An operator ends the open barrier."""
        (answer,) = self.ask(Abort(self.new_session(), RUN, prefix, reason, sequence))
        return answer

    # ------------------------------------------------------------------ watching

    def arriving(self, client: Client, prefix: str, seat: Seat) -> None:
        """A client is about to arrive."""
        assert seat.position is not None
        self.history.append(
            history.Arrived(client.life, prefix, seat.position, seat.payload.decode("utf-8", "replace"))
        )
        self.arrived.add((client.life, prefix, seat.position))

    def _watch(
        self, event: Event, earlier: list[Decision], decided: list[Decision], deliveries: list[Delivery]
    ) -> None:
        """Count who is present, and hold every decision against it."""
        answers = [m for sessions, m in deliveries if getattr(event, "session", None) in sessions]
        refused = {answer.rank for answer in answers if isinstance(answer, Refused)}
        accepted = None not in refused
        if isinstance(event, ArriveOnce):
            # What the call ended by joining, before it arrived.
            ended = [decision for decision in decided if decision not in answers]
            for decision in ended:
                self._check_present(decision)
            decided = [decision for decision in decided if decision in answers]
            earlier = earlier + ended
        match event:
            case Enter() if accepted:
                (entered,) = (answer for answer in answers if isinstance(answer, Entered))
                for info, entry in zip(event.processes, entered.entries, strict=True):
                    if entry.refusal is None:
                        self._speaking[event.session][1][info.rank] = info.incarnation
            case Hello() if accepted:
                ranks = {info.rank: info.incarnation for info in event.processes}
                self._speaking[event.session] = event.run_id, ranks
            case Arrive() if accepted:
                counted = [arrival for arrival in event.arrivals if arrival.rank not in refused]
                if len(counted) > 1:
                    # One may have decided the barrier, before those who come behind it in the message.
                    late = {one.rank for decision in decided for one in decision.missing}
                    counted = [arrival for arrival in counted if arrival.rank not in late]
                self._count(event, counted, earlier, answers)
            case ArriveOnce() if accepted:
                self._speaking[event.session] = event.run_id, {event.process.rank: event.process.incarnation}
                self._replace(event, (event.process.rank,))
                self._count(event, (event.arrival,), earlier, answers)
        for decision in decided:
            self._check_present(decision)
        if isinstance(event, JoinGroup) and accepted:
            joined = event.ranks or tuple(self._speaking[event.session][1])
            self._replace(event, [rank for rank in joined if rank not in refused])

    def _check_present(self, decision: Decision) -> None:
        """Hold a decision against who was present."""
        present = self._present.pop((decision.run_id, decision.prefix), {})
        missing = [one.rank for one in decision.missing]
        assert missing == sorted(set(missing))
        assert not set(missing) & set(present), "one who has arrived is named as missing"
        assert decision.required == decision.arrived + len(missing)
        if decision.outcome in (Outcome.MISMATCHED, Outcome.ABORTED):
            # Those may be the arrivals of ranks that the barrier's first arrival did not know of.
            assert decision.arrived <= len(present)
        else:
            assert decision.arrived == len(present), "the arrivals are not counted right"
        assert decision.outcome is not Outcome.RELEASED or not missing

    def _count(
        self,
        event: Arrive | ArriveOnce,
        arrivals: Iterable[Arrival],
        earlier: list[Decision],
        answers: list[Message],
    ) -> None:
        """Who arrives at the barrier that is not decided yet is present."""
        run, ranks = self._speaking[event.session]
        group = run, event.prefix
        on_disk = len(self.disk.decided.get(group, ()))
        undecided = on_disk + sum((d.run_id, d.prefix) == group for d in earlier)
        old = any(isinstance(a, Decision) and a.sequence < undecided for a in answers)
        if event.sequence == undecided or (event.sequence is None and not old):
            present = self._present.setdefault(group, {})
            for arrival in arrivals:
                present.setdefault(arrival.rank, ranks[arrival.rank])

    def _replace(self, event: JoinGroup | ArriveOnce, joined: Collection[int]) -> None:
        """A newer incarnation takes the place of who was present for its rank."""
        run, ranks = self._speaking[event.session]
        present = self._present.get((run, event.prefix), {})
        for rank in joined:
            if present.get(rank) != ranks[rank]:
                present.pop(rank, None)

    def assert_nobody_waits_in_vain(self) -> None:
        """Whoever waits with an open stream is counted by the barrier that is open."""
        riders = (
            client for line in self.lines.values() for client in line.riders.values() if client.line is line
        )
        for client in (*self.streams.values(), *riders):
            for prefix, seat in client.seats.items():
                if seat.waiting:
                    barrier = self.group(prefix, client.run).open
                    assert barrier is not None, f"{client} waits at {prefix} #{seat.position}: none is open"
                    assert barrier.sequence == seat.position
                    assert barrier.arrivals[client.rank].incarnation == client.incarnation

    def assert_good(self) -> None:
        """All that was heard so far keeps the rules."""
        self.assert_nobody_waits_in_vain()
        history.assert_good(self.history)
