"""A world around the core, without sockets: a disk, streams, client processes and crashes.

``World`` feeds events to a :class:`Coordinator`, puts the records of each step on a "disk" (a dict) and then
delivers. It can crash between any two of these. ``Client`` behaves as the SDK does: it takes its position
from its first join, arrives there, sends everything again after a reconnect, and goes on when it has heard.

The world checks some invariants of the design at every step of every test:

- A delivered decision is on disk: invariant 2 (durable before delivered).
- A stored decision never changes: invariant 1 (one decision per barrier).
- Sequences have no gaps: invariant 12 (the coordinator assigns the sequence).
- The missing ranks are those that have not arrived: invariant 5 (every rank learns all missing ranks).
- The counters of the core match its processes and payloads.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterable
from typing import Any

from muster.service.core.barriers.group import Group
from muster.service.core.coordinator import Coordinator
from muster.service.core.retention.retention import FOR_EVER, Retention
from muster.service.core.vocabulary.effects import Delivery, Effects, Message, ProcessesAdded, Refused
from muster.service.core.vocabulary.events import (
    Abort,
    AddProcesses,
    Arrival,
    Arrive,
    ArriveOnce,
    Disconnected,
    Event,
    Evict,
    Hello,
    JoinGroup,
    ProcessInfo,
    Tick,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision, Instant, Outcome
from tests.support.world import history
from tests.support.world.core_client import CKPT, TIMEOUT, Client, GroupMembership
from tests.support.world.core_disk import Crash, Disk
from tests.support.world.relay_stream import RelayStream

RUN = "job1"
TTL = 10.0
WALL = 1_700_000_000.0
MAX_TICKS = 1_000
"""Ticks at one moment after which the core is in an endless loop."""


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
        self.relay_streams: dict[int, RelayStream] = {}
        self.arrived: set[tuple[history.RankProcess, str, int]] = set()
        """Every arrival: (process, prefix, sequence)."""
        self.clients: list[Client] = []
        self.crash_next: Crash | None = None
        self.last = Effects()
        """The effects of the last step."""
        self._sessions = itertools.count(1)
        self._counter = itertools.count()
        self.watching = True
        self._present: dict[tuple[str, str], dict[int, str]] = {}
        """The ranks that have arrived at the open barrier of each group, counted independently."""
        self._speaking: dict[int, tuple[str, dict[int, str]]] = {}
        """By session: its run, and the incarnations by rank."""
        self.start_coordinator()

    def count(self) -> int:
        return next(self._counter)

    # ------------------------------------------------------------------ the coordinator

    def start_coordinator(self) -> None:
        self.epoch += 1
        self.serves_since = self.now
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
        for stream in list(self.relay_streams.values()):
            stream.breaks(seen=False)
            stream.broken_sessions.clear()
        for client in self.clients:
            client.broken_session = client.broken_relay_stream = None
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
                elif session in self.relay_streams:
                    self.relay_streams[session].hear(message, ranks)
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
        end, ticks = self.now + seconds, 0
        while (deadline := self.coordinator.next_deadline()) is not None and deadline <= end:
            ticks = ticks + 1 if deadline <= self.now else 0
            assert ticks < MAX_TICKS, "a timer is armed for the past again and again"
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
        if client.broken_relay_stream is not None:
            client.broken_relay_stream.remove_processes(client)

    def open_relay_stream(self, *clients: Client) -> RelayStream:
        """Open a relay's stream with these clients, which have no other stream."""
        stream = RelayStream(self, RUN, 0, "node-0 (pid 70)")
        stream.add_processes(*clients)
        return stream

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

    def arriving(self, client: Client, prefix: str, membership: GroupMembership) -> None:
        """A client is about to arrive."""
        assert membership.position is not None
        self.history.append(
            history.Arrived(
                client.rank_process,
                prefix,
                membership.position,
                membership.payload.decode("utf-8", "replace"),
            )
        )
        self.arrived.add((client.rank_process, prefix, membership.position))

    def _watch(
        self, event: Event, earlier: list[Decision], decided: list[Decision], deliveries: list[Delivery]
    ) -> None:
        """Count who is present, and hold every decision against it."""
        answers = [m for sessions, m in deliveries if getattr(event, "session", None) in sessions]
        refused = {answer.rank for answer in answers if isinstance(answer, Refused)}
        accepted = None not in refused
        if isinstance(event, ArriveOnce):
            # What the call ended by joining, before it arrived. It may be answered with that.
            ended = [one for one in decided if one not in answers or _ended_without(event.process.rank, one)]
            for decision in ended:
                self._check_present(decision)
            decided = [decision for decision in decided if decision not in ended]
            earlier = earlier + ended
        match event:
            case AddProcesses() if accepted:
                (entered,) = (answer for answer in answers if isinstance(answer, ProcessesAdded))
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
        """Count the ranks that arrive at the open barrier."""
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
        """Uncount an older incarnation whose rank a newer one took over."""
        run, ranks = self._speaking[event.session]
        present = self._present.get((run, event.prefix), {})
        for rank in joined:
            if present.get(rank) != ranks[rank]:
                present.pop(rank, None)

    def assert_nobody_waits_in_vain(self) -> None:
        """Check that the open barrier counts every client that waits with an open stream."""
        relayed = (
            client
            for stream in self.relay_streams.values()
            for client in stream.clients.values()
            if client.relay_stream is stream
        )
        for client in (*self.streams.values(), *relayed):
            for prefix, membership in client.memberships.items():
                if membership.waiting:
                    barrier = self.group(prefix, client.run).open
                    assert barrier is not None, (
                        f"{client} waits at {prefix} #{membership.position}: none is open"
                    )
                    assert barrier.sequence == membership.position
                    assert barrier.arrivals[client.rank].incarnation == client.incarnation

    def assert_good(self) -> None:
        """All that was heard so far keeps the rules."""
        self.assert_nobody_waits_in_vain()
        history.assert_good(self.history)


def _ended_without(rank: int, decision: Decision) -> bool:
    """Whether a barrier was aborted before a rank arrived."""
    return decision.outcome is Outcome.ABORTED and rank in {one.rank for one in decision.missing}
