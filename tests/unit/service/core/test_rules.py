"""The invariants of docs/design.md, under everything that can happen in any order.

A Hypothesis state machine drives processes, relays, time, generations and crashes at random. An independent
judge (:mod:`tests.support.world.history`), which knows nothing of the coordinator, checks what every rank
heard. The world itself (:mod:`tests.support.world.core_world`) checks the disk and the missing ranks at every
step, and each relay's stream (:mod:`tests.support.world.relay_stream`) checks what it hears for which rank.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from muster.service.core.vocabulary.effects import Refused
from muster.service.core.vocabulary.events import Evict, ProcessInfo, WriteReport
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Decision, MemberState, Ranks, Shape
from muster.service.core.vocabulary.refusal import Reason
from tests.support.expect import some
from tests.support.world.checked_job import CALLS, HELPERS, PREFIXES, SAVES, CheckedJob
from tests.support.world.core_client import Client, GroupMembership
from tests.support.world.core_disk import Crash
from tests.support.world.core_world import RUN, World
from tests.support.world.relay_stream import RelayStream

TIMEOUTS = (4.0, 30.0, 300.0)
index = st.integers(0, 11)
prefixes = st.sampled_from(PREFIXES)
timeouts = st.sampled_from(TIMEOUTS)
rarely = st.sampled_from([False] * 9 + [True])
ways = st.sampled_from([None, 0, 1])
"""To the coordinator: by a stream of its own, or by one of two relays."""


class Job(CheckedJob):
    """A job of two to four ranks, its processes and its coordinator."""

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
        client.connect(self.relay_stream(way, self.generation))
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
        broken = [
            c for c in self.world.clients if c.broken_session is not None or c.broken_relay_stream is not None
        ]
        if client := self.pick(broken, number):
            self.world.coordinator_sees_it(client)

    @rule(number=index, way=ways)
    def reconnect(self, number: int, way: int | None) -> None:
        if client := self.pick([client for client in self.alive if client.session is None], number):
            client.connect(self.relay_stream(way, client.generation))

    @rule(number=index, way=ways)
    def move(self, number: int, way: int | None) -> None:
        """A process goes over to another stream, before anyone has seen its old one break."""
        if client := self.pick(self.connected, number):
            client.stream_breaks()
            client.connect(self.relay_stream(way, client.generation))

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
        for stream in self.relay_streams.values():
            stream.breaks()
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
        """They arrive together, and all leave. Others begin memberships alone before they call again."""
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
                # After a reset of the group, it hears again what came after the newest release.
                caller = epoch, self.world.disk.resets[RUN, CALLS], incarnation
                assert answer.sequence > self.answered.get(caller, -1)
                self.answered[caller] = answer.sequence
        if hangs_up:
            self.world.hang_up(call.session)

    # ------------------------------------------------------------------ relays

    @rule(number=index, seen=st.booleans())
    def a_relay_is_lost(self, number: int, seen: bool) -> None:
        """All its clients come back by streams of their own, or with it."""
        if stream := self.pick_relay_stream(number):
            stream.breaks(seen=seen)

    @rule(number=index)
    def the_coordinator_sees_that_a_relay_is_lost(self, number: int) -> None:
        broken = [stream for stream in self.relay_streams.values() if stream.broken_sessions]
        if broken:
            broken[number % len(broken)].coordinator_sees_it()

    @rule(number=index)
    def a_relay_says_goodbye(self, number: int) -> None:
        if stream := self.pick_relay_stream(number):
            stream.goodbye()

    @rule(way=st.integers(0, 1))
    def a_relay_adds_processes(self, way: int) -> None:
        """All who are nowhere come by one relay, with one message; of two for one rank only the first may."""
        stream = some(self.relay_stream(way, self.generation))
        coming = [client for client in self.current if client.session is None]
        stream.add_processes(*coming)
        for client in coming:
            if client.session is not None:
                client.resume()

    @rule(number=index)
    def a_relay_removes_processes(self, number: int) -> None:
        """Several connections to one relay break at once; or of such as it does not speak for any more."""
        if stream := self.pick_relay_stream(number):
            clients = list(stream.clients.values())
            stream.remove_processes(*clients[: number % (1 + len(clients))], others=(7,))

    @rule(number=index, prefix=prefixes, timeout=timeouts)
    def a_node_arrives(self, number: int, prefix: str, timeout: float) -> None:
        """A relay folds what its processes say of one barrier."""
        stream = self.pick_relay_stream(number)
        if stream is None:
            return
        clients = [client for client in stream.clients.values() if client.relay_stream is stream]
        clients = [client for client in clients if self.takes_part(client, prefix)]
        shapes = {self.shape_of(client, prefix) for client in clients}
        joining = [
            c for c in clients if prefix not in c.memberships or c.memberships[prefix].position is None
        ]
        if joining and len(shapes) == 1:
            for client in joining:
                size, participants = min(shapes)
                client.memberships.setdefault(prefix, GroupMembership(Shape(size, Ranks(participants))))
            stream.join(joining, prefix, *min(shapes))
        memberships = {
            client: client.memberships[prefix] for client in clients if prefix in client.memberships
        }
        ready = {
            c: s.position
            for c, s in memberships.items()
            if c.relay_stream is stream and s.position is not None
        }
        ready = {client: sequence for client, sequence in ready.items() if not memberships[client].waiting}
        if not ready:
            return
        sequence = max(ready.values())
        arriving = [client for client, its in ready.items() if its == sequence]
        for client in arriving:
            payload = str(client.rank).encode()
            client.about_to_arrive(prefix, payload, timeout=timeout, report=self.report(prefix, sequence))
        stream.arrive(arriving, prefix, sequence, timeout)

    def pick_relay_stream(self, number: int) -> RelayStream | None:
        """One that is open."""
        streams = [stream for stream in self.relay_streams.values() if stream.session is not None]
        return streams[number % len(streams)] if streams else None

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
        membership = self.join_of(client, prefix)
        if membership is not None and membership.position is not None and not membership.waiting:
            report = self.report(prefix, membership.position)
            client.arrive(prefix, payload=payload, failure=failure, timeout=timeout, report=report)

    def join_of(self, client: Client, prefix: str) -> GroupMembership | None:
        """Its place in a group, if it is still connected."""
        if client.session is None or not self.takes_part(client, prefix):
            return None
        if prefix not in client.memberships or client.memberships[prefix].position is None:
            client.join(prefix, *self.shape_of(client, prefix))
        return client.memberships[prefix] if client.session is not None else None

    def report(self, prefix: str, sequence: int) -> WriteReport | None:
        """The barriers of one group are those of saves."""
        return WriteReport(step=10 * sequence, commits=True) if prefix == SAVES else None

    @rule(number=index, prefix=prefixes)
    def arrive_twice(self, number: int, prefix: str) -> None:
        waiting = [c for c in self.connected if prefix in c.memberships and c.memberships[prefix].waiting]
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
        assert not any(
            membership.waiting for client in self.connected for membership in client.memberships.values()
        )
        self.world.assert_good()


TestJob = pytest.mark.timeout(600)(Job.TestCase)  # a failure takes minutes to be made small
TestJob.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)
