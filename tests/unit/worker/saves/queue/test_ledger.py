"""The state of a queue of saves, in any order of events."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from muster.worker.decision import Outcome as BarrierOutcome
from muster.worker.errors import MusterError, OutcomeUnknownError
from muster.worker.saves.queue.effects import (
    Answer,
    Await,
    Clean,
    DecidedSave,
    EndWrite,
    Order,
    QueueEnded,
    ReleaseQueue,
    Reopen,
    Reserved,
    RetireGroup,
    View,
    Vote,
)
from muster.worker.saves.queue.events import (
    Abandoned,
    Abort,
    CheckOpen,
    Cleaned,
    Close,
    Decided,
    EndWrites,
    Event,
    Forget,
    GetView,
    OutcomeUnknown,
    Reopened,
    Reserve,
    Take,
    Wait,
    WriteEnded,
    WriteStarted,
)
from muster.worker.saves.queue.ledger import Ledger
from muster.worker.saves.queue.states import QueueState, SaveState

THREADS = (1, 2)
REFUSED = MusterError("refused")
NOT_COMMITTED = MusterError("not committed")
GONE = OutcomeUnknownError("gone", "save", 0, BarrierOutcome.UNKNOWN)


@dataclass(eq=False)
class ModelSave:
    """What the model knows of one save."""

    thread: int
    idx: int = -1
    """-1: it was refused."""
    preparing: bool = True
    """Whether its caller has neither filled nor abandoned it."""
    whole: bool = True
    """Whether this rank may vote for it: nothing of it has failed or was killed."""
    awaited: int = 0
    """How often its write was waited for."""
    decided: int = 0
    committed: bool = False
    cleaned: int = 0
    taken: bool = False
    aborted: bool = False


@dataclass
class World:
    """A ledger, and around it callers, writers, a voter and a group, which do as the test says."""

    ledger: Ledger = field(default_factory=Ledger)
    saves: list[ModelSave] = field(default_factory=list)
    """Those that have a number, in the order of the numbers."""
    writers: dict[ModelSave, str | None] = field(default_factory=dict)
    """Those that run, and why they were killed."""
    order: Order | None = None
    """What the voter does."""
    has_group: bool = False
    in_doubt: bool = False
    unknown: bool = False
    """Whether nobody could say how the last vote ended."""
    aborted_at: int | None = None
    asked: set[int] = field(default_factory=set)
    answers: dict[int, Any] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=count)

    def ask(self, question: Callable[[int], Event]) -> int:
        """Hand in a question; under its number its answer will be found."""
        asker = next(self.numbers)
        self.asked.add(asker)
        self.apply(question(asker))
        return asker

    def apply(self, event: Event) -> None:
        """Hand in an event, and carry out what follows."""
        for effect in self.ledger.step(event):
            match effect:
                case Answer():
                    self.answer(effect.asker, effect.value)
                case Reserved():
                    assert effect.idx == len(self.saves)
                    effect.save.idx = effect.idx
                    self.saves.append(effect.save)
                    self.answer(effect.asker, effect.idx)
                case Reopen():
                    assert not self.has_group
                    if self.in_doubt:
                        self.answer(effect.question.asker, REFUSED)
                    else:
                        self.has_group = True
                        self.apply(Reopened())
                        self.apply(effect.question)
                case EndWrite():
                    effect.save.whole = False
                    if effect.save in self.writers:
                        self.writers[effect.save] = effect.reason
                case RetireGroup():
                    assert self.ledger.state is not QueueState.OPEN
                    assert self.unknown, "a save is given up only if the coordinator is away"
                    self.in_doubt = True
                    effect.save.decided += 1
                case ReleaseQueue():
                    self.shut(effect)
                case Await() | Vote() | Clean():
                    assert self.order is None, "the voter has one order at a time"
                    self.order = effect
                    if isinstance(effect, Vote):
                        self.check_vote(effect)

    def check_vote(self, order: Vote) -> None:
        """The voter is to vote on a save, or to ask again what became of that."""
        save: ModelSave = order.save
        assert save.decided == 0, "each save is voted on once"
        assert all(other.decided == 1 for other in self.saves[: save.idx]), "in order"
        assert (order.failure is None) is save.whole, "a failure is a vote"
        since = None
        if self.aborted_at is not None and save.idx >= self.aborted_at:
            since = save.idx - self.aborted_at
        assert order.since_abort == since

    def answer(self, asker: int, value: object) -> None:
        """A caller gets its answer."""
        assert asker in self.asked
        assert asker not in self.answers, "a question has one answer"
        assert value is not GONE or self.unknown
        self.answers[asker] = value

    def shut(self, effect: ReleaseQueue) -> None:
        """The queue ends."""
        assert self.has_group
        assert self.order is None
        assert all(save.decided == 1 and save.cleaned == 1 for save in self.saves)
        assert all(save.preparing for save in self.writers), "no writer is left running"
        self.has_group = False
        dropped = effect.dropped
        for asker in effect.askers:
            self.answer(asker, QueueEnded(dropped))
            dropped = ()

    # ------------------------------------------------------------------ what callers do

    def reserve(self, thread: int) -> ModelSave:
        """Begin a save on a thread, which does not go on with an earlier one."""
        if self.ledger.state is QueueState.OPEN:
            self.leave(thread)
        save = ModelSave(thread)
        self.ask(lambda asker: Reserve(save, thread, asker))
        return save

    def close(self, thread: int) -> int:
        """Close the queue on a thread, which does not go on with a save."""
        self.leave(thread)
        return self.ask(lambda asker: Close(thread, asker))

    def leave(self, thread: int) -> None:
        """What a thread prepares has failed."""
        for save in self.saves:
            if save.preparing and save.thread == thread:
                save.whole = False

    def fill(self, save: ModelSave, *, writes: bool) -> None:
        """The caller has started the write."""
        save.preparing = False
        if writes:
            self.writers[save] = None
        self.apply(WriteStarted(save))

    def abandon(self, save: ModelSave, *, writes: bool) -> None:
        """The caller was interrupted, before it has started a write or after that."""
        save.preparing = save.whole = False
        if writes:
            self.writers[save] = None
        self.apply(Abandoned(save, "it was interrupted"))

    def take(self) -> DecidedSave | None:
        """Take the oldest save, to finalize it."""
        taken: DecidedSave | None = self.answers[self.ask(Take)]
        if taken is not None:
            save: ModelSave = taken.save
            assert not save.aborted, "after an abort nothing is finalized"
            assert not save.taken, "a save is finalized once"
            assert save.decided == 1
            assert all(other.taken or other.aborted for other in self.saves[: save.idx]), "in order"
            assert (taken.error is None) is save.committed
            save.taken = True
        return taken

    # ------------------------------------------------------------------ what the voter does

    def voter_answers(self, failure: str | None, verdict: MusterError | None) -> None:
        """The voter is done with its order.

        Args:
            failure: of a write.
            verdict: of the ranks on a save that this rank has written.
        """
        order, self.order = self.order, None
        match order:
            case Await():
                save: ModelSave = order.save
                save.awaited += 1
                failure = self.writers.pop(save, None) or failure
                save.whole = save.whole and failure is None
                self.apply(WriteEnded(save, failure))
            case Vote():
                self.vote(order, verdict)
            case Clean():
                order.save.cleaned += 1
                self.apply(Cleaned(order.save))

    def vote(self, order: Vote, verdict: MusterError | None) -> None:
        """The ranks decide, or nobody knows."""
        save: ModelSave = order.save
        self.unknown = verdict is GONE
        if self.unknown:
            self.apply(OutcomeUnknown(save, GONE))
            return
        if order.failure is not None:
            verdict = NOT_COMMITTED
        save.decided, save.committed = 1, verdict is None
        self.apply(Decided(save, verdict))


@settings(max_examples=150, stateful_step_count=40, deadline=None)
class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.steps = 0
        """A queue that has closed does little, so it does not close at once."""
        self.closed = False

    @property
    def preparing(self) -> list[ModelSave]:
        return [save for save in self.world.saves if save.preparing]

    @rule(thread=st.sampled_from(THREADS))
    def reserve(self, thread: int) -> None:
        world = self.world
        state, before, next_idx = world.ledger.state, len(world.saves), world.ledger.view.next_idx
        world.reserve(thread)
        opens = state is QueueState.OPEN or (state is QueueState.INACTIVE and not world.in_doubt)
        assert len(world.saves) == before + opens
        assert world.ledger.view.next_idx == next_idx + opens

    @precondition(lambda self: self.preparing)
    @rule(data=st.data(), writes=st.booleans())
    def fill(self, data: st.DataObject, writes: bool) -> None:
        self.world.fill(data.draw(st.sampled_from(self.preparing)), writes=writes)

    @precondition(lambda self: self.preparing)
    @rule(data=st.data(), writes=st.booleans())
    def interrupt(self, data: st.DataObject, writes: bool) -> None:
        self.world.abandon(data.draw(st.sampled_from(self.preparing)), writes=writes)

    @precondition(lambda self: any(not save.preparing for save in self.world.saves))
    @rule(data=st.data())
    def frame_ends_later(self, data: st.DataObject) -> None:
        done = [save for save in self.world.saves if not save.preparing]
        self.world.apply(Abandoned(data.draw(st.sampled_from(done)), "its frame is gone"))

    @rule()
    def frame_ends_before_its_save_was_reserved(self) -> None:
        self.world.apply(Abandoned(ModelSave(1), "its frame is gone"))

    @rule(thread=st.sampled_from(THREADS))
    def save(self, thread: int) -> None:
        save = self.world.reserve(thread)
        if save.idx >= 0:
            self.world.fill(save, writes=True)

    @precondition(lambda self: self.world.order is not None)
    @rule(
        failure=st.sampled_from([None, None, "disk full"]),
        verdict=st.sampled_from([None, None, NOT_COMMITTED, GONE]),
        times=st.integers(1, 4),
    )
    def voter_answers(self, failure: str | None, verdict: MusterError | None, times: int) -> None:
        for _ in range(times):
            if self.world.order is not None:
                self.world.voter_answers(failure, verdict)

    @rule()
    def take(self) -> None:
        self.world.take()

    @rule(thread=st.sampled_from(THREADS))
    def wait(self, thread: int) -> None:
        world = self.world
        asker = world.ask(lambda asker: Wait(thread, asker))
        if asker in world.answers and isinstance(world.answers[asker], int):
            rest = [save for save, state in world.ledger.saves() if state is not SaveState.DECIDED]
            assert all(save.preparing and save.thread == thread for save in rest)

    @rule()
    def look(self) -> None:
        world = self.world
        view = world.answers[world.ask(GetView)]
        left = [save for save in world.saves if not (save.taken or (save.aborted and save.decided))]
        ready = next((n for n, save in enumerate(left) if not save.decided), len(left))
        assert view == View(world.ledger.state, len(world.saves), ready, len(left))

    @rule()
    def check_open(self) -> None:
        world = self.world
        answer = world.answers[world.ask(CheckOpen)]
        assert (answer is None) is (world.ledger.state is QueueState.OPEN)

    @rule()
    def end_writes(self) -> None:
        self.world.apply(EndWrites("enough"))

    @precondition(lambda self: self.steps > 10)
    @rule(thread=st.sampled_from(THREADS))
    def close(self, thread: int) -> None:
        self.world.close(thread)
        self.closed = True

    @rule()
    def abort(self) -> None:
        world = self.world
        state = world.ledger.state
        if state in (QueueState.OPEN, QueueState.CLOSING):
            world.aborted_at = len(world.saves)
        for save in world.saves:
            save.aborted = save.aborted or not save.taken
            save.whole = save.whole and not save.preparing
        world.ask(lambda asker: Abort("aborted", asker))
        if state is QueueState.CLOSED:
            assert world.ledger.state is QueueState.CLOSED

    @precondition(lambda self: self.steps > 10 and not self.preparing)
    @rule()
    def forget(self) -> None:
        self.world.apply(Forget())

    @invariant()
    def count_steps(self) -> None:
        self.steps += 1

    @invariant()
    def closed_queue_never_opens_again(self) -> None:
        state = self.world.ledger.state
        assert not self.closed or state in (QueueState.CLOSING, QueueState.CLOSED)

    @invariant()
    def group_is_held_while_the_queue_votes(self) -> None:
        world = self.world
        assert world.has_group is (world.ledger.state in (QueueState.OPEN, QueueState.CLOSING))
        assert not (isinstance(world.order, Vote) and not world.has_group)

    @invariant()
    def voter_has_work_while_there_is_some(self) -> None:
        world = self.world
        waits = [save for save, state in world.ledger.saves() if state is not SaveState.DECIDED]
        if waits and not waits[0].preparing:
            assert world.order is not None

    def teardown(self) -> None:
        """Everything ends: callers, the voter, the queue."""
        world = self.world
        for save in self.preparing:
            world.abandon(save, writes=True)
        world.close(1)
        while world.order is not None:
            world.voter_answers(None, None)
        while world.take() is not None:
            pass
        assert world.ledger.over
        assert world.ledger.state is QueueState.CLOSED
        assert not world.writers, "no writer is left running"
        assert world.asked == set(world.answers)
        for save in world.saves:
            assert (save.decided, save.cleaned, save.awaited) == (1, 1, 1)
            assert save.taken or save.aborted
        assert world.ledger.view == View(QueueState.CLOSED, len(world.saves), 0, 0)


TestAnyOrder = AnyOrder.TestCase


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(["filled", "interrupted", "interrupted after the start", "left"]), max_size=8)
)
def test_numbers_are_the_same_on_all_ranks_whatever_is_interrupted_on_one(endings: list[str]):
    here, there = World(), World()
    for ending in endings:
        there.fill(there.reserve(1), writes=True)
        save = here.reserve(1)
        if ending == "filled":
            here.fill(save, writes=True)
        elif ending != "left":
            here.abandon(save, writes=ending != "interrupted")
        assert here.ledger.view.next_idx == there.ledger.view.next_idx
    for world in (here, there):
        world.close(1)
        while world.order is not None:
            world.voter_answers(None, None)
    assert [save.decided for save in here.saves] == [save.decided for save in there.saves]
    assert [save.committed for save in here.saves] == [ending == "filled" for ending in endings]


def test_unknown_outcome_is_asked_for_until_the_queue_closes():
    world = World()
    saves = []
    for _ in range(3):
        saves.append(world.reserve(1))
        world.fill(saves[-1], writes=True)
    world.voter_answers(None, None)
    waits = world.ask(lambda asker: Wait(1, asker))
    for _ in range(2):
        assert world.order == Vote(saves[0], None, None)
        world.voter_answers(None, GONE)
        assert world.answers[waits] is GONE
    ends = world.close(1)
    votes: Counter[int] = Counter()
    while (order := world.order) is not None:
        votes[order.save.idx] += isinstance(order, Vote)
        world.voter_answers(None, GONE)
    assert votes == {0: 1, 1: 0, 2: 0}, "the barrier of a later save would be that of the first"
    assert world.answers[ends] == QueueEnded(())
    assert world.in_doubt
    assert [world.take() for _ in range(4)] == [*(DecidedSave(save, GONE) for save in saves), None]


@pytest.mark.parametrize("closes", [False, True])
def test_abort_ends_as_closed_only_if_the_queue_is_closed_meanwhile(closes: bool):
    world = World()
    world.fill(world.reserve(1), writes=True)
    over = world.ask(lambda asker: Abort("aborted", asker))
    if closes:
        world.close(1)
    while world.order is not None:
        world.voter_answers(None, None)
    assert world.ledger.state is (QueueState.CLOSED if closes else QueueState.INACTIVE)
    assert [outcome.error for outcome in world.answers[over].dropped] == [NOT_COMMITTED]
