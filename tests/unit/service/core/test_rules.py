"""The rules of design.md §3, under everything that can happen in any order.

A Hypothesis state machine drives processes, time, generations and crashes at random. What every rank heard is
judged by :mod:`tests.support.history`, which knows nothing of the coordinator; the world itself (see
:mod:`tests.support.core_world`) watches the disk and the missing at every step.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from muster.service.core.events import Hello
from muster.service.core.refusal import Reason
from tests.support.core_world import RUN, Client, Crash, World

PREFIXES = ("checkpoint", "eval")
TIMEOUTS = (4.0, 30.0)
EXPECTED = {Reason.STALE_GENERATION, Reason.SUPERSEDED, Reason.SESSION_REPLACED, Reason.SEQUENCE_BEHIND}
"""What a well-behaved process may be refused for. Above all it is never ahead, and nothing is forgotten."""

index = st.integers(0, 1_000)
prefixes = st.sampled_from(PREFIXES)
seconds = st.sampled_from([0.5, 3.0, 9.0, 11.0, 40.0])
crashes = st.sampled_from(list(Crash))


class Job(RuleBasedStateMachine):
    """A job of two to four ranks, its processes and its coordinator."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(3)
        self.generation = 0
        self.subset: tuple[int, ...] = ()
        """Who takes part in the group "eval"; empty is everyone."""

    # ------------------------------------------------------------------ choosing

    def pick(self, among: list[Client], number: int) -> Client | None:
        return among[number % len(among)] if among else None

    @property
    def alive(self) -> list[Client]:
        return [client for client in self.world.clients if client.alive]

    @property
    def connected(self) -> list[Client]:
        return [client for client in self.alive if client.session is not None]

    @property
    def apart(self) -> list[Client]:
        return [client for client in self.alive if client.session is None]

    def shape_of(self, client: Client, prefix: str, odd: bool) -> tuple[int, tuple[int, ...]]:
        size = self.world.world_size + (1 if odd else 0)
        if prefix == "eval" and self.subset and client.rank in self.subset:
            return size, self.subset
        return max(size, client.rank + 1), ()

    # ------------------------------------------------------------------ processes

    @rule()
    def start_every_missing_rank(self) -> None:
        here = {c.rank for c in self.alive if c.generation == self.generation}
        for rank in set(range(self.world.world_size)) - here:
            self.world.start(rank, generation=self.generation)

    @rule(number=index)
    def start_a_process(self, number: int) -> None:
        """A restarted rank, or a second process for a rank that has one."""
        if len(self.alive) < 9:
            self.world.start(number % self.world.world_size, generation=self.generation)

    @rule(number=index)
    def kill(self, number: int) -> None:
        if client := self.pick(self.alive, number):
            client.die()

    @rule(number=index)
    def restart_a_rank(self, number: int) -> None:
        if client := self.pick(self.alive, number):
            client.die()
            self.world.start(client.rank, generation=self.generation)

    @rule(number=index)
    def goodbye(self, number: int) -> None:
        if client := self.pick(self.connected, number):
            client.goodbye()

    @rule(number=index, seen=st.booleans())
    def lose_connection(self, number: int, seen: bool) -> None:
        if client := self.pick(self.connected, number):
            client.stream_breaks()
            if seen:
                self.world.coordinator_sees_it(client)

    @rule(number=index)
    def coordinator_sees_a_broken_stream(self, number: int) -> None:
        broken = [client for client in self.world.clients if client.broken_session is not None]
        if client := self.pick(broken, number):
            self.world.coordinator_sees_it(client)

    @rule(number=index)
    def reconnect(self, number: int) -> None:
        if client := self.pick(self.apart, number):
            client.connect()

    @rule()
    def reconnect_all(self) -> None:
        for client in self.apart:
            client.connect()

    @rule(size=st.integers(2, 4), subset=st.sampled_from([(), (0, 1), (1,)]))
    def new_generation(self, size: int, subset: tuple[int, ...]) -> None:
        """The job is restarted, perhaps with another size; the old processes are not gone yet."""
        self.generation += 1
        self.world.world_size = size
        self.subset = subset
        self.world.start(self.generation % size, generation=self.generation)

    # ------------------------------------------------------------------ barriers

    @rule(number=index, prefix=prefixes, odd=st.integers(0, 30))
    def join(self, number: int, prefix: str, odd: int) -> None:
        if client := self.pick(self.connected, number):
            size, participants = self.shape_of(client, prefix, odd == 30)
            client.join(prefix, size, participants)

    @rule(
        number=index,
        prefix=prefixes,
        timeout=st.sampled_from(TIMEOUTS),
        payload=st.sampled_from([b"", b"", b"p"]),
        fails=st.integers(0, 8),
    )
    def arrive(self, number: int, prefix: str, timeout: float, payload: bytes, fails: int) -> None:
        if client := self.pick(self.connected, number):
            self.arrive_of(client, prefix, timeout, payload, "disk full" if fails == 8 else None)

    @rule(prefix=prefixes, timeout=st.sampled_from(TIMEOUTS), rounds=st.integers(1, 2))
    def everyone_arrives(self, prefix: str, timeout: float, rounds: int) -> None:
        for _ in range(rounds):
            for client in self.connected:
                self.arrive_of(client, prefix, timeout, f"{client.rank}".encode(), None)

    def arrive_of(
        self, client: Client, prefix: str, timeout: float, payload: bytes, failure: str | None
    ) -> None:
        if client.session is None:
            return
        seat = client.seats.get(prefix)
        if seat is None or seat.position is None:
            client.join(prefix, *self.shape_of(client, prefix, odd=False))
            seat = client.seats[prefix]
        if client.session is not None and seat.position is not None and not seat.waiting:
            client.arrive(prefix, payload=payload, failure=failure, timeout=timeout)

    @rule(number=index, prefix=prefixes)
    def arrive_twice(self, number: int, prefix: str) -> None:
        waiting = [c for c in self.connected if prefix in c.seats and c.seats[prefix].waiting]
        if client := self.pick(waiting, number):
            client.arrive_again(prefix)

    @rule(prefix=prefixes)
    def operator_aborts(self, prefix: str) -> None:
        if RUN in self.world.coordinator.runs:
            self.world.abort(prefix, "enough")

    # ------------------------------------------------------------------ time and crashes

    @rule(duration=seconds)
    def time_passes(self, duration: float) -> None:
        self.world.wait(duration)

    @precondition(lambda self: self.world.coordinator.next_deadline() is not None)
    @rule()
    def next_deadline(self) -> None:
        self.world.tick()

    @rule(duration=seconds)
    def a_tick_comes_late(self, duration: float) -> None:
        self.world.tick(self.world.now + duration)

    @rule()
    def coordinator_crashes(self) -> None:
        self.world.crash()

    @rule(crash=crashes)
    def coordinator_crashes_in_the_next_step(self, crash: Crash) -> None:
        self.world.crash_next = crash

    # ------------------------------------------------------------------ judging

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        self.world.assert_nobody_waits_in_vain()

    @invariant()
    def refusals_are_expected(self) -> None:
        for client in self.world.clients:
            for refused in client.refusals:
                assert refused.refusal.reason in EXPECTED, refused.refusal.message

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
        assert not any(seat.waiting for client in self.connected for seat in client.seats.values())
        self.world.assert_good()


TestJob = Job.TestCase
TestJob.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
