"""Unary calls: all at once or not at all. One that is refused has changed nothing, whatever came before."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from muster.service.core.coordinator import Coordinator
from muster.service.core.vocabulary.effects import Effects, Refused
from muster.service.core.vocabulary.events import (
    Arrival,
    ArriveOnce,
    CloseRun,
    Disconnected,
    Event,
    Evict,
    Goodbye,
    ProcessInfo,
    Tick,
)
from muster.service.core.vocabulary.limits import Limits
from muster.service.core.vocabulary.model import Instant
from muster.service.core.vocabulary.refusal import Reason

LIMITS = Limits(
    max_runs=1,
    max_groups_per_run=2,
    max_payload_bytes=2,
    max_unheard_decisions=3,
    decision_history=2,
    max_kept_missing=1,
    max_processes_per_rank=2,
)
RUN = "job1"
RANKS = st.sampled_from([0, 0, 0, 1, 1, 1, 2])
PREFIXES = st.sampled_from(["p"] * 8 + ["q", "r"])
NOBODYS_FAULT = {Reason.HELLO_REQUIRED, Reason.HELLO_REPEATED, Reason.NOT_JOINED}
"""What no caller can be guilty of."""


class Calls(RuleBasedStateMachine):
    """Calls of every kind, ended and repeated, beside the deadlines that they leave."""

    def __init__(self) -> None:
        super().__init__()
        self.coordinator = Coordinator(session_ttl=10.0, limits=LIMITS)
        self.now = 0.0
        self.sessions = 0
        self.open: list[int] = []

    def session(self) -> int:
        self.sessions += 1
        return self.sessions

    def do(self, event: Event) -> Effects:
        effects = Effects()
        self.coordinator.step(event, Instant(self.now, 1e9 + self.now), effects)
        return effects

    @rule(
        rank=RANKS,
        generation=st.sampled_from([0] * 8 + [1, 2]),
        incarnation=st.sampled_from(["x", "y"]),
        prefix=PREFIXES,
        world_size=st.sampled_from([2] * 8 + [3]),
        sequence=st.none() | st.integers(0, 6),
        payload=st.sampled_from([b""] * 4 + [b"a"] * 4 + [b"too much"]),
        failure=st.sampled_from([None, "disk full"]),
        timeout=st.sampled_from([5.0] * 4 + [50.0] * 4 + [0.0]),
    )
    def call(self, rank, generation, incarnation, prefix, world_size, sequence, payload, failure, timeout):
        before = self.state()
        event = ArriveOnce(
            session=self.session(),
            run_id=RUN,
            generation=generation,
            process=ProcessInfo(rank, incarnation, "laptop", 1),
            prefix=prefix,
            world_size=world_size,
            participants=(),
            sequence=sequence,
            timeout=timeout,
            arrival=Arrival(rank, payload, failure),
        )
        effects = self.do(event)
        answers = [message for sessions, message in effects.deliveries if event.session in sessions]
        refused = [answer.refusal.reason for answer in answers if isinstance(answer, Refused)]
        if refused:
            assert self.state() == before, refused
            assert effects.records == []
            assert len(effects.deliveries) == len(refused) == 1
            assert refused[0] not in NOBODYS_FAULT
        else:
            self.open.append(event.session)

    @rule(which=st.integers(0, 5))
    def hang_up(self, which: int):
        if self.open:
            self.do(Disconnected(self.open.pop(which % len(self.open))))

    @rule(which=st.integers(0, 5))
    def leave(self, which: int):
        if self.open:
            self.do(Goodbye(self.open.pop(which % len(self.open))))

    @rule(seconds=st.sampled_from([1.0, 11.0, 60.0]))
    def wait(self, seconds: float):
        end = self.now + seconds
        while (due := self.coordinator.next_deadline()) is not None and due <= end:
            self.now = max(self.now, due)
            self.do(Tick())
        self.now = end

    @rule(rank=RANKS, rarely=st.integers(0, 4))
    def evict(self, rank: int, rarely: int):
        if not rarely:
            self.do(Evict(self.session(), RUN, rank, ""))

    @rule(rarely=st.integers(0, 19))
    def close(self, rarely: int):
        if rarely:
            return
        self.do(CloseRun(self.session(), RUN, "ann@desk", ""))

    def state(self) -> object:
        """All that a call could change, but for the time at which the run was last used."""
        run = self.coordinator.runs.get(RUN)
        if run is None:
            return None
        return (
            run.generation,
            sorted(self.coordinator.sessions.open),
            [(str(p), p.incarnation, p.state, p.session, p.ordinal) for p in run.roster],
            {
                prefix: (
                    group.generation,
                    group.first_sequence,
                    group.next_sequence,
                    sorted(
                        (rank, s.process.incarnation, s.start, s.last) for rank, s in group.owners.items()
                    ),
                    group.open and {rank: p.incarnation for rank, p in group.open.arrivals.items()},
                )
                for prefix, group in run.groups.items()
            },
        )

    @invariant()
    def no_group_is_empty(self):
        run = self.coordinator.runs.get(RUN)
        for group in run.groups.values() if run is not None else ():
            assert group.owners or group.decisions or group.open


Calls.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestCalls = Calls.TestCase
