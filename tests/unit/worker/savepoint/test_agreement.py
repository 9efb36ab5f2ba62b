"""Agreeing on a step: whatever happens to ranks and coordinator, no two of them save at different ones."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from muster.client.save_votes import PREFIX, Phase, SaveVote, parse_vote
from muster.service.core.saves.notices import key_of
from muster.service.core.vocabulary.effects import SaveRequested
from muster.service.core.vocabulary.events import CancelSave, RequestSave
from muster.service.core.vocabulary.model import SaveState
from muster.worker.decision import Decision, Outcome
from muster.worker.savepoint.agreement import AHEAD, Course, Next, combine
from muster.worker.session.save_request import SaveAsked
from tests.support.world.core_world import RUN, WALL, World
from tests.support.world.trainers import Trainer


class Saves(RuleBasedStateMachine):
    """Ranks at any steps, requests and withdrawals at any time, deaths, restarts, and ranks that finish."""

    @initialize(size=st.integers(1, 4), start=st.integers(0, 1000), lag=st.integers(0, 5))
    def begin(self, size: int, start: int, lag: int) -> None:
        self.world = World(world_size=size)
        self.generation = 0
        self.gone: list[Trainer] = []
        self.heeded: set[str] = set()
        """Notices whose save all ranks made, or an operator withdrew."""
        self.trainers = [Trainer(self.world, rank, 0, start + rank * lag) for rank in range(size)]

    @rule(rank=st.integers(0, 3), steps=st.integers(1, 4))
    def train(self, rank: int, steps: int) -> None:
        trainer = self.trainers[rank % len(self.trainers)]
        for _ in range(steps if trainer.client.session is not None else 0):
            trainer.train()

    @rule(rank=st.integers(0, 3))
    def attend(self, rank: int) -> None:
        trainer = self.trainers[rank % len(self.trainers)]
        if trainer.client.session is not None:
            trainer.attend()

    @rule()
    def train_all(self) -> None:
        for rank in range(len(self.trainers)):
            self.train(rank, 1)

    @rule(stop=st.booleans(), seconds=st.none() | st.sampled_from([1.0, 60.0, 800.0]))
    def ask(self, stop: bool, seconds: float | None = None) -> None:
        self.world.do(RequestSave(self.world.new_session(), RUN, stop, "someone", "", deadline=seconds))

    @rule(number=st.integers(0, 3), stop=st.booleans(), seconds=st.none() | st.sampled_from([1.0, 60.0]))
    def notice(self, number: int, stop: bool, seconds: float | None) -> None:
        """A watcher sends a notice, perhaps again."""
        ask = RequestSave(900, RUN, stop, "watcher", "", deadline=seconds, notice=f"n{number}")
        (answer,) = self.world.ask(ask)
        if isinstance(answer, SaveRequested) and key_of(f"n{number}", stop=stop) in self.heeded:
            assert answer.was_asked

    @invariant()
    def notices_are_kept_until_their_request_lapses(self) -> None:
        save = self.world.coordinator.runs[RUN].saving.save
        if save is None:
            return
        kept = {one.id: one.number for one in save.notices}
        assert self.heeded <= kept.keys()
        assert all(number <= save.number for number in kept.values())
        if save.state in (SaveState.DONE, SaveState.WITHDRAWN):
            self.heeded |= {notice for notice, number in kept.items() if number == save.number}

    @rule()
    def cancel(self) -> None:
        self.world.do(CancelSave(self.world.new_session(), RUN, ""))

    @rule(rank=st.integers(0, 3))
    def reconnect(self, rank: int) -> None:
        client = self.trainers[rank % len(self.trainers)].client
        if client.alive and not client.refusals:
            client.reconnect()

    @rule(rank=st.integers(0, 3), goodbye=st.booleans())
    def ends(self, rank: int, goodbye: bool) -> None:
        client = self.trainers[rank % len(self.trainers)].client
        if client.session is not None:
            client.goodbye() if goodbye else client.die()

    @rule(seconds=st.sampled_from([0.1, 11.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule()
    def crash(self) -> None:
        self.world.crash()
        for trainer in self.trainers:
            if trainer.client.alive and not trainer.client.refusals:
                trainer.client.connect()

    @rule(start=st.integers(0, 1000))
    @precondition(lambda self: any(not trainer.client.alive for trainer in self.trainers))
    def restart(self, start: int) -> None:
        """Start the job again, as torchrun does in another round."""
        for trainer in self.trainers:
            if trainer.client.session is not None:
                trainer.client.die()
        self.gone += self.trainers
        self.generation += 1
        self.trainers = [
            Trainer(self.world, rank, self.generation, start) for rank in range(self.world.world_size)
        ]

    @rule(rank=st.integers(0, 3), step=st.integers(0, 1000))
    def one_begins_anew(self, rank: int, step: int) -> None:
        """A process is restarted alone; whether in time is another matter."""
        rank %= len(self.trainers)
        if not self.trainers[rank].client.alive:
            self.gone.append(self.trainers[rank])
            self.trainers[rank] = Trainer(self.world, rank, self.generation, step)

    @invariant()
    def all_save_at_the_same_steps_and_hear_the_same_of_the_end(self) -> None:
        steps: dict[int, int] = {}
        stops: dict[int, bool] = {}
        for trainer in (*self.gone, *self.trainers):
            for sequence, step in trainer.saved.items():
                assert steps.setdefault(sequence, step) == step
            for sequence, stop in trainer.done.items():
                assert stops.setdefault(sequence, stop) is stop
        # Who hears that all have saved is one of all who have.
        for done in stops:
            savers = {t.client.rank for t in (*self.gone, *self.trainers) if done - 1 in t.saved}
            assert savers == set(range(len(self.trainers)))

    @invariant()
    def connected_ranks_know_the_deadline_of_the_open_request(self) -> None:
        saving = self.world.coordinator.runs[RUN].saving
        for trainer in self.trainers:
            if trainer.client.session is None or saving.save is None or trainer.asked is None:
                continue
            assert trainer.asked.number <= saving.save.number
            if saving.save.state.stands and trainer.asked.number == saving.save.number:
                assert (trainer.deadline is None) is (saving.save.deadline is None)
                if saving.save.deadline is not None and trainer.deadline is not None:
                    due = saving.save.deadline - WALL
                    # Past the deadline, a rank that connects is told that no time is left.
                    assert due - 0.001 <= trainer.deadline <= max(due, trainer.client.save_asked_at) + 0.001
            elif not saving.save.state.stands and trainer.asked.withdrawn:
                assert trainer.deadline is None

    def teardown(self) -> None:
        """What stands, or is asked for now, is done by ranks that live."""
        trainers = self.trainers
        if any(trainer.client.session is None for trainer in trainers):
            return
        saving = self.world.coordinator.runs[RUN].saving
        for turn in range(2_400):
            for trainer in trainers:
                trainer.attend()
                trainer.train()
            if turn % 1_100 == 0:
                # A failed request is left to the job's next generation, unless somebody asks again.
                self.ask(stop=True)
            if saving.save is not None and not saving.save.state.stands:
                break
        save = saving.save
        assert save is not None
        assert save.state is SaveState.DONE, save
        assert save.stop
        for trainer in trainers:
            trainer.look()
            # It ends also if the request to stop was withdrawn after the ranks had agreed on its step.
            assert list(trainer.done.values())[-1]
            assert list(trainer.saved.values())[-1] == save.step
        self.all_save_at_the_same_steps_and_hear_the_same_of_the_end()


TestSaves = Saves.TestCase
TestSaves.settings = settings(max_examples=150, stateful_step_count=40)


class Lockstep(RuleBasedStateMachine):
    """With a collective in each step nobody goes on before all have come so far; pushes come at any time."""

    @initialize(size=st.integers(2, 4))
    def begin(self, size: int) -> None:
        self.world = World(world_size=size)
        self.trainers = [Trainer(self.world, rank) for rank in range(size)]

    @rule(stop=st.booleans())
    def ask(self, stop: bool) -> None:
        self.world.do(RequestSave(self.world.new_session(), RUN, stop, "someone", ""))

    @rule(ranks=st.sets(st.integers(0, 3)))
    def attend(self, ranks: set[int]) -> None:
        for rank in ranks:
            self.trainers[rank % len(self.trainers)].attend()

    @rule(rank=st.integers(0, 3))
    def train(self, rank: int) -> None:
        trainer = self.trainers[rank % len(self.trainers)]
        for one in self.trainers:
            one.look()
        # Those who are one step behind are in this collective, or have not come to it.
        if trainer.step <= min(one.step for one in self.trainers):
            trainer.train()

    def teardown(self) -> None:
        """Once all have heard, the save is a few steps away."""
        saving = self.world.coordinator.runs[RUN].saving
        if saving.save is None:
            return
        for _ in range(12 * len(self.trainers)):
            for rank in range(len(self.trainers)):
                self.trainers[rank].attend()
                self.train(rank)
        assert saving.save.state is SaveState.DONE, [trainer.step for trainer in self.trainers]
        assert len({trainer.step for trainer in self.trainers}) <= 2


TestLockstep = Lockstep.TestCase
TestLockstep.settings = settings(max_examples=100, stateful_step_count=30)


def asked(number: int = 1, since: int = 0, *, stop: bool = False, withdrawn: bool = False) -> SaveAsked:
    return SaveAsked(number, since, stop, "asked for by someone", withdrawn)


def released(*words: bytes, sequence: int = 0) -> Decision:
    return Decision(
        prefix=PREFIX,
        sequence=sequence,
        outcome=Outcome.RELEASED,
        message="",
        payloads=dict(enumerate(words)),
    )


def test_rank_ends_the_step_it_is_in_before_it_waits():
    course = Course(2, 0)
    assert course.after(7) is Next.GO_ON
    course.promise(8)
    assert parse_vote(course.payload(asked())) == SaveVote(Phase.AGREE, 8 + AHEAD, 1, stop=False)
    assert [course.after(step) for step in (8, 9, 10)] == [Next.GO_ON, Next.WAIT, Next.WAIT]
    course.promise(7)
    assert course.after(9) is Next.WAIT
    course.promise(9)
    assert [course.after(step) for step in (9, 10)] == [Next.GO_ON, Next.WAIT]


def test_ranks_agree_on_the_greatest_bound():
    course = Course(2, 0)
    course.promise(8)
    assert course.agreed(released(course.payload(asked()), SaveVote(Phase.AGREE, 13, 2, stop=True).encode()))
    assert [course.after(step) for step in (10, 12, 13, 14)] == [
        *(Next.GO_ON, Next.GO_ON, Next.SAVE, Next.GO_ON)
    ]
    assert parse_vote(course.payload(asked())) == SaveVote(Phase.DONE, 13, 2, stop=True)


def test_rank_that_counts_in_tens_saves_at_its_next_step():
    course = Course(1, 0)
    course.promise(20)
    assert course.after(30) is Next.WAIT
    course.agreed(released(course.payload(asked())))
    assert course.after(30) is Next.SAVE
    assert parse_vote(course.payload(asked())) == SaveVote(Phase.DONE, 30, 1, stop=False)


def test_saves_at_different_steps_are_not_done():
    words = [SaveVote(Phase.DONE, step, 1, stop=False).encode() for step in (10, 11)]
    assert combine(released(*words), Phase.DONE, 2) is None
    assert combine(released(words[0], words[0]), Phase.DONE, 2) is not None


@pytest.mark.parametrize(
    "junk", [b"", b"agree", b"agree 1 1", b"agree x 1 0", b"leave 1 1 0", b"\xff 1 1 0", b"agree 1 1 0 0"]
)
def test_unusable_payload_prevents_the_agreement(junk: bytes):
    good = SaveVote(Phase.AGREE, 3, 1, stop=False).encode()
    assert combine(released(good, good), Phase.AGREE, 2) is not None
    assert combine(released(good, junk), Phase.AGREE, 2) is None
    assert combine(released(good, SaveVote(Phase.DONE, 3, 1, stop=False).encode()), Phase.AGREE, 2) is None
    assert combine(released(good), Phase.AGREE, 2) is None


def test_failed_request_is_not_repeated_but_later_ones_are_made():
    course = Course(1, 0)
    course.promise(8)
    lost = Decision(prefix=PREFIX, sequence=4, outcome=Outcome.MEMBER_LOST, message="")
    assert not course.agreed(lost)
    assert course.idle
    assert not course.wants(asked(1))
    assert not course.wants(asked(2, since=4))
    assert not course.wants(asked(2, since=5, withdrawn=True))
    assert course.wants(asked(2, since=5))


def test_request_older_than_the_process_is_not_its_own():
    course = Course(2, 5)
    assert not course.wants(asked(since=4))
    assert course.stands(asked(since=4))
    assert course.wants(asked(since=5))
