"""The invariants of docs/design.md, under everything that can happen in any order.

A Hypothesis state machine drives processes, relays, time, generations and crashes at random. An independent
judge (:mod:`tests.support.world.history`), which knows nothing of the coordinator, checks what every rank
heard. The world itself (:mod:`tests.support.world.core_world`) checks the disk and the missing ranks at every
step, and each relay's stream (:mod:`tests.support.world.core_lines`) checks what it hears for which rank.
"""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from muster.service.core.barriers.checkpoints import MAX_FAILURES
from muster.service.core.membership.process import SUCCESSION_WINDOW, Process
from muster.service.core.vocabulary.effects import Refused
from muster.service.core.vocabulary.events import Evict, ProcessInfo, WriteReport
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision, MemberState, Outcome, Ranks, Shape
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.core_lines import Line
from tests.support.world.core_world import RUN, Client, Crash, Seat, World

PREFIXES = ("checkpoint", "checkpoint", "eval")
SAVES = "checkpoint"
"""The group whose barriers are those of saves."""
HELPERS = "helper"
"""The group of processes that are not a rank's trainer."""
CALLS = "calls"
"""The group of processes that arrive by unary calls."""
TIMEOUTS = (4.0, 30.0, 300.0)


@dataclass(frozen=True, slots=True)
class Succession:
    """One process took over a group from another of its rank."""

    prefix: str
    life: int
    """Of the group."""
    rank: int
    older: str
    newer: str


index = st.integers(0, 11)
prefixes = st.sampled_from(PREFIXES)
timeouts = st.sampled_from(TIMEOUTS)
rarely = st.sampled_from([False] * 9 + [True])
ways = st.sampled_from([None, 0, 1])
"""To the coordinator: by a stream of its own, or by one of two relays."""


class Job(RuleBasedStateMachine):
    """A job of two to four ranks, its processes and its coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(3)
        self.generation = 0
        self.judged: dict[Client, int] = {}
        """How many of its refusals have been looked at."""
        self.subset: tuple[int, ...] = ()
        """Who takes part in the group "eval"; empty is everyone."""
        self.odd: set[Client] = set()
        """Processes that see another world size than the others."""
        self.lines: dict[tuple[int, int], Line] = {}
        """Each relay's, by relay and generation."""
        self.evicted: set[int] = set()
        """Ranks, at any time."""
        self.helpers: set[Client] = set()
        """Processes of a rank that take part in a group of their own, and in no other."""
        self.called: dict[int, float] = {}
        """When a unary call spoke for a rank last."""
        self.answered: dict[tuple[int, int, str], int] = {}
        """By epoch, life of the group and incarnation: the last barrier whose decision answered a call."""
        self.owned: dict[tuple[str, int], tuple[int, Process]] = {}
        """By group and rank: the process that spoke last, and in which of the group's lives."""
        self.successions: list[Succession] = []
        """Of processes that took over a group from another, those of the groups' present lives."""

    # ------------------------------------------------------------------ choosing

    @property
    def alive(self) -> list[Client]:
        return [client for client in self.world.clients if client.alive]

    @property
    def connected(self) -> list[Client]:
        return [client for client in self.alive if client.session is not None]

    @property
    def current(self) -> list[Client]:
        """The processes of the newest generation, those that are connected first."""
        mine = [client for client in self.alive if client.generation == self.generation]
        return sorted(mine, key=lambda client: client.session is None)

    def pick(self, among: list[Client], number: int) -> Client | None:
        return among[number % len(among)] if among else None

    def takes_part(self, client: Client, prefix: str) -> bool:
        if client in self.helpers:
            return prefix == HELPERS
        return prefix != "eval" or not self.subset or client.rank in self.subset

    def shape_of(self, client: Client, prefix: str) -> tuple[int, tuple[int, ...]]:
        size = self.world.world_size + (client in self.odd)
        if prefix == "eval" and self.subset and self.takes_part(client, prefix):
            return size, self.subset
        return max(size, client.rank + 1), ()

    def line(self, way: int | None, generation: int) -> Line | None:
        """The relay's stream of this way."""
        if way is None:
            return None
        return self.lines.setdefault((way, generation), Line(self.world, RUN, generation, f"relay-{way}"))

    # ------------------------------------------------------------------ processes

    @initialize(size=st.integers(2, 4), way=ways, most=st.sampled_from([1_000, 1_000, 3]))
    def start(self, size: int, way: int | None, most: int) -> None:
        self.world = World(size, limits=Limits(max_total_gather_bytes=most))
        self.start_missing_ranks(way)

    def start_missing_ranks(self, way: int | None = None) -> None:
        here = {client.rank for client in self.current if client not in self.helpers}
        for rank in sorted(set(range(self.world.world_size)) - here):
            self.start_one(rank, way)

    def start_one(self, rank: int, way: int | None) -> Client:
        client = self.world.start(rank, generation=self.generation, connect=False)
        client.connect(self.line(way, self.generation))
        return client

    @rule(rank=index, odd=rarely, late=rarely)
    def start_a_process(self, rank: int, odd: bool, late: bool) -> None:
        """A second process for a rank that may have one, of which each may come to speak in each group.

        One that is late says hello when others may have come and left.
        """
        if len(self.alive) < 9:
            rank %= self.world.world_size
            client = self.world.start(rank, generation=self.generation, connect=not late)
            if odd:
                self.odd.add(client)

    @rule(rank=index, acts=st.booleans(), way=ways)
    def start_a_helper(self, rank: int, acts: bool, way: int | None) -> None:
        """It says hello for a rank that may have other processes, and speaks for it elsewhere, if at all."""
        if len(self.alive) < 9:
            helper = self.start_one(rank % self.world.world_size, way)
            self.helpers.add(helper)
            if acts and helper.session is not None:
                helper.join(HELPERS, self.world.world_size, (helper.rank,))
            if acts and helper.session is not None:
                helper.arrive(HELPERS)

    @rule(number=index, how=st.sampled_from(["killed", "killed and started again", "leaves"]), way=ways)
    def a_process_ends(self, number: int, how: str, way: int | None) -> None:
        client = self.pick(self.current, number)
        if client is None:
            return
        if how == "leaves" and client.session is not None:
            client.goodbye()
            return
        client.die()
        if how == "killed and started again":
            self.start_one(client.rank % self.world.world_size, way)

    @rule(number=index, prefix=prefixes)
    def a_restarted_process_joins_one_of_its_groups(self, number: int, prefix: str) -> None:
        """And the others much later, if at all."""
        if client := self.pick([one for one in self.current if one not in self.helpers], number):
            for one in PREFIXES:
                self.join_of(client, one)
            client.die()
            self.join_of(self.start_one(client.rank, None), prefix)
            self.world.wait(70.0)

    @rule(number=index, seen=st.booleans())
    def a_stream_breaks(self, number: int, seen: bool) -> None:
        """It may be seen by the client only, for now. For one on a relay's, it is that to the relay."""
        if client := self.pick(self.connected, number):
            client.stream_breaks()
            if seen:
                self.world.coordinator_sees_it(client)

    @rule(number=index)
    def the_coordinator_sees_a_broken_stream(self, number: int) -> None:
        broken = [c for c in self.world.clients if c.broken_session is not None or c.broken_line is not None]
        if client := self.pick(broken, number):
            self.world.coordinator_sees_it(client)

    @rule(number=index, way=ways)
    def reconnect(self, number: int, way: int | None) -> None:
        if client := self.pick([client for client in self.alive if client.session is None], number):
            client.connect(self.line(way, client.generation))

    @rule(number=index, way=ways)
    def move(self, number: int, way: int | None) -> None:
        """A process goes over to another stream, before anyone has seen its old one break."""
        if client := self.pick(self.connected, number):
            client.stream_breaks()
            client.connect(self.line(way, client.generation))

    @rule(prefix=prefixes, timeout=timeouts, newcomer=index, hears=st.integers(0, 3), joins=st.booleans())
    def a_partition_outlasts_the_ttl(
        self, prefix: str, timeout: float, newcomer: int, hears: int, joins: bool
    ) -> None:
        """It begins when the last rank arrives; and a new process says hello before anyone is back."""
        self.start_missing_ranks()
        self.reconnect_all()
        current = [client for client in self.current if client not in self.helpers]
        for client in current[:-1]:
            self.arrive_of(client, prefix, timeout, str(client.rank).encode(), None)
        for client in current[hears:]:
            if client.session is not None and client is not current[-1]:
                client.stream_breaks()
        self.arrive_of(current[-1], prefix, timeout, str(current[-1].rank).encode(), None)
        self.everyone_is_lost()
        if len(self.alive) < 9:
            new = self.start_one(newcomer % self.world.world_size, None)
            if joins:
                self.arrive_of(new, prefix, timeout, b"", None)

    def everyone_is_lost(self) -> None:
        """All streams break, and nobody is back within the session TTL."""
        for client in self.connected:
            client.stream_breaks()
        for client in self.world.clients:
            self.world.coordinator_sees_it(client)
        for line in self.lines.values():
            line.breaks()
        self.world.wait(11.0)

    @rule(number=index)
    def an_operator_evicts(self, number: int) -> None:
        if client := self.pick(self.current, number):
            self.evicted.add(client.rank)
            self.world.do(Evict(self.world.new_session(), RUN, client.rank, "broken"))

    @rule(rank=index, other=st.booleans(), timeout=timeouts, hangs_up=st.booleans())
    def somebody_calls(self, rank: int, other: bool, timeout: float, hangs_up: bool) -> None:
        self.call(rank, other, timeout, hangs_up)

    @rule(rank=index, fails=st.integers(0, 2))
    def callers_are_away_for_long(self, rank: int, fails: int) -> None:
        """They arrive together, and everyone leaves; others begin lives alone before they call again."""
        for one in range(self.world.world_size):
            self.call(one, False, 300.0, True)
        self.everyone_is_lost()
        for _ in range(fails):
            self.call(rank, True, 4.0, True)
            self.world.wait(16.0)
        for _ in range(2):
            self.call(rank + 1, False, 4.0, True)

    def call(self, rank: int, other: bool, timeout: float, hangs_up: bool) -> None:
        """A process arrives by a unary call, at whatever is next: each call gets further than the last."""
        rank %= self.world.world_size
        incarnation = f"caller-{rank}-{other:d}-{self.generation}"
        call = self.world.arrive_once(
            rank,
            generation=self.generation,
            process=ProcessInfo(rank, incarnation, "laptop", 1),
            prefix=CALLS,
            timeout=timeout,
        )
        self.called[rank] = self.world.now
        epoch = self.world.epoch
        answers = self.world.ask(call)
        if self.world.epoch != epoch:
            return
        for answer in answers:
            if isinstance(answer, Refused):
                reason = answer.refusal.reason
                assert reason is Reason.SUPERSEDED or (reason is Reason.EVICTED and rank in self.evicted)
            if isinstance(answer, Decision):
                # In another life of the group, it hears again what came after the newest release.
                caller = epoch, self.world.disk.eras[RUN, CALLS], incarnation
                assert answer.sequence > self.answered.get(caller, -1)
                self.answered[caller] = answer.sequence
        if hangs_up:
            self.world.hang_up(call.session)

    # ------------------------------------------------------------------ relays

    @rule(number=index, seen=st.booleans())
    def a_relay_is_lost(self, number: int, seen: bool) -> None:
        """All who ride on it come back by themselves, or with it."""
        if line := self.pick_line(number):
            line.breaks(seen=seen)

    @rule(number=index)
    def the_coordinator_sees_that_a_relay_is_lost(self, number: int) -> None:
        broken = [line for line in self.lines.values() if line.broken_sessions]
        if broken:
            broken[number % len(broken)].coordinator_sees_it()

    @rule(number=index)
    def a_relay_says_goodbye(self, number: int) -> None:
        if line := self.pick_line(number):
            line.goodbye()

    @rule(way=st.integers(0, 1))
    def a_node_enters(self, way: int) -> None:
        """All who are nowhere come by one relay, with one message; of two for one rank only the first may."""
        line = some(self.line(way, self.generation))
        coming = [client for client in self.current if client.session is None]
        line.enter(*coming)
        for client in coming:
            if client.session is not None:
                client.resume()

    @rule(number=index)
    def processes_part(self, number: int) -> None:
        """Several connections to one relay break at once; or of such as it does not speak for any more."""
        if line := self.pick_line(number):
            riders = list(line.riders.values())
            line.part(*riders[: number % (1 + len(riders))], others=(7,))

    @rule(number=index, prefix=prefixes, timeout=timeouts)
    def a_node_arrives(self, number: int, prefix: str, timeout: float) -> None:
        """A relay folds what its processes say of one barrier."""
        line = self.pick_line(number)
        if line is None:
            return
        riders = [client for client in line.riders.values() if client.line is line]
        riders = [client for client in riders if self.takes_part(client, prefix)]
        shapes = {self.shape_of(client, prefix) for client in riders}
        joining = [c for c in riders if prefix not in c.seats or c.seats[prefix].position is None]
        if joining and len(shapes) == 1:
            for client in joining:
                size, participants = min(shapes)
                client.seats.setdefault(prefix, Seat(Shape(size, Ranks(participants))))
            line.join(joining, prefix, *min(shapes))
        seats = {client: client.seats[prefix] for client in riders if prefix in client.seats}
        ready = {c: s.position for c, s in seats.items() if c.line is line and s.position is not None}
        ready = {client: sequence for client, sequence in ready.items() if not seats[client].waiting}
        if not ready:
            return
        sequence = max(ready.values())
        arriving = [client for client, its in ready.items() if its == sequence]
        for client in arriving:
            payload = str(client.rank).encode()
            client.about_to_arrive(prefix, payload, timeout=timeout, report=self.report(prefix, sequence))
        line.arrive(arriving, prefix, sequence, timeout)

    def pick_line(self, number: int) -> Line | None:
        """One that is open."""
        lines = [line for line in self.lines.values() if line.session is not None]
        return lines[number % len(lines)] if lines else None

    @rule(size=st.integers(2, 4), subset=st.sampled_from([(), (0, 1), (1,)]), rare=st.integers(0, 2))
    def new_generation(self, size: int, subset: tuple[int, ...], rare: int) -> None:
        """The job is restarted, perhaps with another size; the old processes are not gone yet."""
        if rare:
            return
        self.generation += 1
        self.world.world_size = size
        self.subset = subset
        self.world.start(self.generation % size, generation=self.generation)

    # ------------------------------------------------------------------ barriers

    @rule(prefix=prefixes, timeout=timeouts, times=st.integers(1, 3))
    def the_job_goes_on(self, prefix: str, timeout: float, times: int) -> None:
        """Every rank of the newest generation is there, and arrives."""
        self.start_missing_ranks()
        self.reconnect_all()
        for _ in range(times):
            for client in self.current:
                self.arrive_of(client, prefix, timeout, str(client.rank).encode(), None)

    @rule(prefix=prefixes, timeout=timeouts, but=index)
    def all_but_one_arrive(self, prefix: str, timeout: float, but: int) -> None:
        for client in self.connected:
            if client.rank != but % self.world.world_size:
                self.arrive_of(client, prefix, timeout, str(client.rank).encode(), None)

    @rule(number=index, prefix=prefixes, timeout=timeouts, payload=st.sampled_from([b"", b"p"]), fails=rarely)
    def arrive(self, number: int, prefix: str, timeout: float, payload: bytes, fails: bool) -> None:
        """Anyone who is connected, also of an old generation, or superseded."""
        if client := self.pick(self.connected, number):
            self.arrive_of(client, prefix, timeout, payload, "disk full" if fails else None)

    def arrive_of(
        self, client: Client, prefix: str, timeout: float, payload: bytes, failure: str | None
    ) -> None:
        seat = self.join_of(client, prefix)
        if seat is not None and seat.position is not None and not seat.waiting:
            report = self.report(prefix, seat.position)
            client.arrive(prefix, payload=payload, failure=failure, timeout=timeout, report=report)

    def join_of(self, client: Client, prefix: str) -> Seat | None:
        """Its place in a group, if it is still connected."""
        if client.session is None or not self.takes_part(client, prefix):
            return None
        if prefix not in client.seats or client.seats[prefix].position is None:
            client.join(prefix, *self.shape_of(client, prefix))
        return client.seats[prefix] if client.session is not None else None

    def report(self, prefix: str, sequence: int) -> WriteReport | None:
        """The barriers of one group are those of saves."""
        return WriteReport(step=10 * sequence, commits=True) if prefix == SAVES else None

    @rule(number=index, prefix=prefixes)
    def arrive_twice(self, number: int, prefix: str) -> None:
        waiting = [c for c in self.connected if prefix in c.seats and c.seats[prefix].waiting]
        if client := self.pick(waiting, number):
            client.arrive_again(prefix)

    @rule(prefix=prefixes)
    def an_operator_aborts(self, prefix: str) -> None:
        self.world.abort(prefix, "enough")

    # ------------------------------------------------------------------ time and crashes

    @rule(duration=st.sampled_from([0.5, 3.0, 9.0, 11.0, 40.0, 70.0]), late=st.booleans())
    def time_passes(self, duration: float, late: bool) -> None:
        if late:
            self.world.tick(self.world.now + duration)
        else:
            self.world.wait(duration)

    @precondition(lambda self: self.world.coordinator.next_deadline() is not None)
    @rule()
    def the_next_deadline_comes(self) -> None:
        self.world.tick()

    @rule(back=st.booleans())
    def the_coordinator_crashes(self, back: bool) -> None:
        self.world.crash()
        if back:
            self.reconnect_all()

    @rule(crash=st.sampled_from(list(Crash)))
    def the_coordinator_will_crash_in_the_next_step(self, crash: Crash) -> None:
        self.world.crash_next = crash

    def reconnect_all(self) -> None:
        for client in self.alive:
            if client.session is None:
                client.connect()

    # ------------------------------------------------------------------ judging

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        self.world.assert_nobody_waits_in_vain()

    @invariant()
    def nobody_waits_for_the_dead(self) -> None:
        """Who may take the place of a dead process took over a group from it, or came not long ago."""
        for group in (group for run in self.world.coordinator.runs.values() for group in run.groups.values()):
            owners = group.owners if group.open is not None else {}
            for rank in set(owners) - set(group.open.arrivals if group.open is not None else ()):
                dead = owners[rank].process
                if dead.state.gone and group.open is not None and rank in group.open.shape:
                    assert self.may_be_taken_over(dead)

    def may_be_taken_over(self, dead: Process) -> bool:
        of_rank = [client for client in self.world.clients if client.rank == dead.rank]
        newer = [client for client in of_rank if client.ordinal > dead.ordinal]
        # Whoever comes back from an earlier life gives all that came after it as long again.
        came = [client.welcomed_at for client in of_rank] + [self.called.get(dead.rank)]
        if (newer or dead.rank in self.called) and self.world.now < SUCCESSION_WINDOW + max(
            moment for moment in came if moment is not None
        ):
            return True
        return any(self.lives(client) and dead.incarnation in self.lineage(client) for client in newer)

    def lives(self, client: Client) -> bool:
        """Whether it does as far as the coordinator knows."""
        process = self.world.coordinator.runs[RUN].roster.find(client.rank, client.incarnation)
        return process is not None and not process.state.gone

    def lineage(self, client: Client) -> set[str]:
        """The incarnations of its rank that are linked by groups which several of them joined."""
        joined = {
            one.incarnation: {prefix for prefix, seat in one.seats.items() if seat.position is not None}
            for one in self.world.clients
            if self.is_of_same_rank(one, client)
        }
        groups = joined.pop(client.incarnation)
        linked = {client.incarnation}
        while more := {one for one, prefixes in joined.items() if prefixes & groups}:
            groups = groups.union(*(joined.pop(one) for one in more))
            linked |= more
        return linked

    @invariant()
    def no_successor_counts_as_dead(self) -> None:
        """A living process that took over a group from a dead one is waited for in all groups of the dead."""
        if RUN not in self.world.coordinator.runs:
            return
        run, lives = self.world.coordinator.runs[RUN], self.world.disk.eras
        self.successions = [one for one in self.successions if one.life == lives[RUN, one.prefix]]
        for prefix, group in run.groups.items():
            for rank, speaker in group.owners.items():
                life, process = lives[RUN, prefix], speaker.process
                before, last = self.owned.get((prefix, rank), (life, process))
                if before == life and last.incarnation != process.incarnation:
                    self.successions.append(
                        Succession(prefix, life, rank, last.incarnation, process.incarnation)
                    )
                self.owned[prefix, rank] = life, process
        for group in run.groups.values():
            for rank, speaker in group.owners.items():
                dead = speaker.process
                if dead.state.gone and group.generation == run.generation:
                    successors = (
                        run.roster.find(rank, one) for one in self.successors(rank, dead.incarnation)
                    )
                    assert not any(
                        successor is not None and not successor.state.gone for successor in successors
                    ) or (not run.roster.is_gone(rank, dead))

    def successors(self, rank: int, incarnation: str) -> set[str]:
        """The processes that took over a group from this one, or from one of its successors."""
        found, looking = set[str](), {incarnation}
        while looking:
            one = looking.pop()
            found.add(one)
            looking |= {s.newer for s in self.successions if (s.rank, s.older) == (rank, one)} - found
        return found - {incarnation}

    @invariant()
    def each_line_speaks_for_those_who_ride_on_it(self) -> None:
        """And for nobody else: what became of one rank was nothing to the others."""
        sessions = self.world.coordinator.sessions
        for line in self.lines.values():
            assert not line.refused
            assert not line.unanswered
            if line.session is not None:
                speaks = {r: p.incarnation for r, p in sessions.open[line.session].processes.items()}
                assert speaks == {rank: client.incarnation for rank, client in line.riders.items()}
        assert sessions.relayed == sum(len(s.processes) for s in sessions.open.values() if s.relay)

    @invariant()
    def who_is_connected_has_a_stream_and_who_is_not_is_waited_for_until_the_ttl(self) -> None:
        coordinator = self.world.coordinator
        for process in (p for run in coordinator.runs.values() for p in run.roster):
            assert (process.session is not None) == (process.state is MemberState.CONNECTED)
            if process.session is not None:
                session = coordinator.sessions.open[process.session]
                assert session.processes[process.rank] is process
                assert session.relay == process.relay
            if process.state is MemberState.DISCONNECTED:
                assert some(coordinator.next_deadline()) <= process.since + coordinator.session_ttl

    @invariant()
    def each_release_of_a_save_is_a_commit_and_each_failure_a_failed_save(self) -> None:
        if RUN not in self.world.coordinator.runs:
            return
        decided = self.world.disk.decided.get((RUN, SAVES), [])
        released = [one for one in decided if one.outcome is Outcome.RELEASED]
        told = self.world.coordinator.runs[RUN].checkpoints.history
        assert told.committed == len(released)
        if released:
            newest = some(told.newest)
            last = released[-1]
            assert (newest.sequence, newest.committed_at) == (last.sequence, last.decided_at)
            assert newest.step == 10 * last.sequence
        # Of a barrier whose arrivals were all withdrawn nobody has told anything.
        failed = {one.sequence: one for one in decided if one.outcome is not Outcome.RELEASED}
        sequences = [one.sequence for one in told.failures]
        assert sequences == sorted(set(sequences), reverse=True)
        assert len(sequences) <= MAX_FAILURES
        assert failed.keys() >= set(sequences)

    @invariant()
    def refusals_are_expected(self) -> None:
        for client in self.world.clients:
            while self.judged.setdefault(client, 0) < len(client.refusals):
                self.judge(client, client.refusals[self.judged[client]])
                self.judged[client] += 1

    def judge(self, client: Client, refused: Refused) -> None:
        """What a process that behaves may be refused for. It is never ahead, and nothing is forgotten."""
        match refused.refusal.reason:
            case Reason.STALE_GENERATION:
                assert client.generation < self.generation
            case Reason.EVICTED:
                assert client.rank in self.evicted
            case Reason.SESSION_REPLACED:
                assert client.broken_session is None or client.session is not None
            case Reason.SUPERSEDED | Reason.NOT_JOINED:
                assert self.was_superseded(client, refused.prefix)
            case Reason.SEQUENCE_BEHIND:
                # Whoever took its place, for a barrier or for good, may be forgotten with its life: then it
                # goes on where it is told. If nobody did, it must hear the release that it arrived at.
                assert self.was_superseded(client, refused.prefix) or any(
                    other.arrived_at(refused.prefix, some(refused.sequence))
                    for other in self.world.clients
                    if other is not client and self.is_of_same_rank(other, client)
                )
            case _:
                raise AssertionError(refused.refusal.message)

    def was_superseded(self, client: Client, prefix: str) -> bool:
        """Whether a newer process of its rank has taken part in a group."""
        return any(
            prefix in other.seats and other.ordinal > client.ordinal
            for other in self.world.clients
            if self.is_of_same_rank(other, client)
        )

    @staticmethod
    def is_of_same_rank(one: Client, other: Client) -> bool:
        return (one.rank, one.generation) == (other.rank, other.generation)

    def teardown(self) -> None:
        """Whatever happened: in the end nothing is left open, and all that was heard keeps the rules."""
        self.world.crash_next = None
        self.reconnect_all()
        for _ in range(100):
            if self.world.coordinator.next_deadline() is None:
                break
            self.world.tick()
        for run in self.world.coordinator.runs.values():
            assert all(group.open is None for group in run.groups.values())
            assert not any(process.state is MemberState.DISCONNECTED for process in run.roster)
        assert not any(seat.waiting for client in self.connected for seat in client.seats.values())
        self.world.assert_good()


TestJob = pytest.mark.timeout(600)(Job.TestCase)  # a failure takes minutes to be made small
TestJob.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
