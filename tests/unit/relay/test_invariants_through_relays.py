"""The invariants of docs/design.md hold through one relay and two, and while relays and streams come and go.

The real core is asked, by workers behind pipes whose messages come late, or not at all.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from muster.service.core.vocabulary.events import Evict
from muster.service.core.vocabulary.model import MemberState
from tests.support.world.relay_world import RUN, TIMEOUT, TTL, RelayNode, Worker, World

SIZE = 3
RANKS = st.integers(0, SIZE - 1)
VIA = st.sampled_from([None, 0, 1, 2, 2])
"""Directly, through one of two relays, or through a third whose upstream is the first."""
SOME = st.integers(0, 10**6)


class Machine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.world = World(SIZE)

    def _via(self, number: int | None) -> RelayNode | None:
        return None if number is None else self.world.relays[number]

    def _pick(self, some: int, of: list[Worker]) -> Worker:
        return of[some % len(of)]

    @rule(rank=RANKS, prefix=st.sampled_from(["checkpoint", "checkpoint", "eval"]), via=VIA)
    def starts(self, rank: int, prefix: str, via: int | None) -> None:
        if sum(worker.rank == rank for worker in self.world.living) < 2:
            self.world.worker(rank, prefix, self._via(via))

    @rule()
    def all_start(self) -> None:
        for rank in range(SIZE):
            if not any(worker.rank == rank for worker in self.world.living):
                self.world.worker(rank, "checkpoint", self.world.relays[0])
        self.world.settle()

    def _idle(self) -> list[Worker]:
        return [w for w in self.world.living if w.position is not None and w.turn is None and not w.leaving]

    @precondition(lambda self: self._idle())
    @rule(some=SOME, votes=st.sampled_from([False, False, False, False, True]))
    def arrives(self, some: int, votes: bool) -> None:
        self._pick(some, self._idle()).arrive("disk full" if votes else None)

    @precondition(lambda self: self._idle())
    @rule()
    def all_arrive(self) -> None:
        for worker in self._idle():
            worker.arrive(None)

    @precondition(lambda self: self.world.pipes)
    @rule(some=SOME, up=st.booleans(), count=st.integers(1, 4))
    def is_delivered(self, some: int, up: bool, count: int) -> None:
        busy = list(self.world.busy())
        for _ in range(count if busy else 0):
            pipe = busy[some % len(busy)]
            if up:
                pipe.deliver_up()
            else:
                pipe.deliver_down()

    @rule()
    def all_is_delivered(self) -> None:
        self.world.settle()

    @rule(number=st.integers(0, 2))
    def patience_ends(self, number: int) -> None:
        self.world.relays[number].timers.fire()

    @precondition(lambda self: self.world.pipes)
    @rule(some=SOME, seen_above=st.booleans())
    def a_stream_breaks(self, some: int, seen_above: bool) -> None:
        pipe = self.world.pipes[some % len(self.world.pipes)]
        pipe.break_client()
        if seen_above:
            pipe.break_server()

    def _lonely(self) -> list[Worker]:
        return [worker for worker in self.world.living if worker.pipe is None]

    @precondition(lambda self: self._lonely())
    @rule(some=SOME, via=VIA)
    def comes_back(self, some: int, via: int | None) -> None:
        self._pick(some, self._lonely()).connect(self._via(via))

    @precondition(lambda self: self.world.living)
    @rule(some=SOME)
    def is_killed(self, some: int) -> None:
        self._pick(some, self.world.living).die()

    @precondition(lambda self: self._idle())
    @rule(some=SOME)
    def says_goodbye(self, some: int) -> None:
        self._pick(some, self._idle()).goodbye()

    @rule(number=st.integers(0, 2))
    def a_relay_dies(self, number: int) -> None:
        self.world.relays[number].die()

    @rule(rank=RANKS)
    def is_evicted(self, rank: int) -> None:
        self.world.step(Evict(10**9, RUN, rank, "by a test"))

    @rule(seconds=st.sampled_from([0.1, 3.0, TTL + 1]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @invariant()
    def each_process_speaks_on_one_stream_which_knows_it(self) -> None:
        if not hasattr(self, "world"):
            return
        coordinator = self.world.coordinator
        relayed = 0
        for session in coordinator.sessions.open.values():
            relayed += len(session.processes) if session.relay else 0
        assert coordinator.sessions.relayed == relayed

    def teardown(self) -> None:
        """When all that was under way has arrived, and all who live are connected, nobody waits in vain."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(20):
            world.settle()
            for worker in self._lonely():
                worker.connect(world.relays[0])
        world.settle()
        run = world.coordinator.runs.get(RUN)
        for worker in world.living:
            assert worker.welcomed, f"{worker} was never welcomed"
            assert run is not None
            process = run.roster.find(worker.rank, worker.process.incarnation)
            assert process is not None
            assert process.state is MemberState.CONNECTED, f"{worker} is there, and stats as {process.state}"
        for worker in world.workers:
            process = run.roster.find(worker.rank, worker.process.incarnation) if run is not None else None
            if worker.over == "killed" and process is not None:
                assert process.state is not MemberState.CONNECTED, f"the death of {worker} is hidden"
        for _ in range(4):
            world.pass_time(TIMEOUT + TTL)
            world.settle()
        for worker in world.living:
            assert worker.turn is None, f"{worker} waits for a decision that nobody makes"
            assert worker.position is not None, f"{worker} was never told where its group stands"


TestRulesThroughRelays = Machine.TestCase
TestRulesThroughRelays.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
