"""Ranks that are at different saves, since some have left one at a moment at which others have not."""

import enum
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.patience import PATIENCE
from muster.worker.decision import Outcome
from muster.worker.errors import BarrierAbortedError, MemberLostError, MusterError, OutcomeUnknownError
from muster.worker.integrations.commit import commitment as module
from muster.worker.integrations.commit.commitment import Commitment
from muster.worker.integrations.commit.protocol import LATE
from muster.worker.integrations.commit.words import BEGINS, DONE, GIVEN_UP, NOT_YET, REUSED
from muster.worker.transport.fork_guard import start_thread
from tests.support.expect import raising
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.fake_group import FakeGroup, Member
from tests.support.saves.scripted_barrier import ScriptedBarrier, decided


class Does(enum.Enum):
    """What a rank does where a save is to be made."""

    SAVES = "it saves"
    SKIPS = "it was interrupted before"
    LEAVES = "it is interrupted when it has begun"
    GIVES_UP = "a collective fails, in the midst of the save"
    FAILS = "its disk is full"
    OUTLASTS = "it lets the others wait in vain"


class Job:
    """Ranks that save, without a coordinator."""

    def __init__(self, ranks: int = 2) -> None:
        self.group = FakeGroup(ranks)
        self.members = [self.group.member(rank, "checkpoint/dcp") for rank in range(ranks)]
        self.parts: dict[int, set[tuple[int, str]]] = defaultdict(set)
        """By the number of a save, what each rank has written."""
        self.committed: list[str] = []

    def run(self, *programs: list[Does]) -> list[list[bool]]:
        """Which saves each rank was told are checkpoints, if each goes its own way."""
        results = [
            in_thread(partial(self._rank, member, does))
            for member, does in zip(self.members, programs, strict=True)
        ]
        return [result.result(PATIENCE) for result in results]

    def _rank(self, member: Member, program: list[Does]) -> list[bool]:
        try:
            return [self._save(member, f"step-{step}", does) for step, does in enumerate(program)]
        finally:
            self.group.lose(member.rank)

    def _save(self, member: Member, name: str, does: Does) -> bool:
        if does is Does.OUTLASTS:
            self.group.outlast(member)
        if does in (Does.SKIPS, Does.OUTLASTS):
            return False
        barrier: Any = member
        save = Commitment(barrier, 60.0, name=name)
        if does is Does.LEAVES:
            return False
        try:
            self._write(save, name, does)
        except MusterError:
            return False
        return True

    def _write(self, save: Commitment, name: str, does: Does) -> None:
        number = save.begun()
        if does is Does.GIVES_UP:
            save.give_up()
        if does is Does.FAILS:
            save.failed("No space left on device")
        self.parts[number].add((save.rank, name))
        save.written()
        if save.rank == 0:
            save.claim()
            assert self.parts[number] == {(member.rank, name) for member in self.members}, "it is torn"
            self.committed.append(name)
            save.committed()
        save.confirmed()


PLAIN = [Does.SAVES] * 3


@pytest.mark.parametrize("does", list(Does))
def test_ranks_that_are_one_save_apart_meet_at_the_next_one(does: Does):
    job = Job()
    results = job.run([*PLAIN, Does.SAVES, *PLAIN, *PLAIN], [*PLAIN, does, *PLAIN, *PLAIN])
    assert results[0] == results[1], "what one takes for a checkpoint is one to all"
    assert all(results[0][:3])
    assert all(results[0][-3:])
    made = {f"step-{step}" for step, is_one in enumerate(results[0]) if is_one}
    assert set(job.committed) == made


def faults(*kinds: Does) -> st.SearchStrategy[list[Does]]:
    return st.lists(st.sampled_from(kinds), min_size=4, max_size=4)


@settings(max_examples=25, deadline=None)
@given(
    programs=st.permutations(range(3)).flatmap(
        lambda order: st.tuples(
            *(faults(*Does) if who == 0 else faults(*set(Does) - {Does.OUTLASTS}) for who in order)
        )
    )
)
def test_wherever_ranks_leave_their_saves_they_meet_again(programs: tuple[list[Does], ...]):
    module._last.clear()
    module._highest.clear()
    job = Job(3)
    results = job.run(*(program + 3 * PLAIN for program in programs))
    assert [result[-2:] for result in results] == [[True, True]] * 3
    assert len(job.committed) == len(set(job.committed))


def begun(
    rank: int, name: str, timeout: float = 300.0, *, again: bool = False, pace: float = PATIENCE
) -> tuple[Commitment, ScriptedBarrier]:
    """A save of which a rank has said that it begins."""
    barrier = ScriptedBarrier(rank)
    as_barrier: Any = barrier
    save = Commitment(as_barrier, timeout, name=name, pace=pace)
    assert barrier.heard() == BEGINS + (REUSED if again else b"") + name.encode()
    return save, barrier


def at(**names: str) -> Any:
    """What is decided where ranks begin these saves."""
    words: dict[str, Any] = {rank: BEGINS + name.encode() for rank, name in names.items()}
    return decided(**words)


def test_rank_that_is_behind_gives_up_its_save():
    save, barrier = begun(0, "step-9")
    barrier.answers.put(at(rank_0="step-9", rank_1="step-10"))
    with pytest.raises(MusterError, match=r"save 'step-9' .* is given up: .* since rank 1 at 'step-10'"):
        save.begun()
    save.join(PATIENCE)
    assert barrier.said.empty()


def test_rank_that_is_ahead_waits_for_the_other_ranks(caplog: pytest.LogCaptureFixture):
    save, barrier = begun(1, "step-10")
    barrier.answers.put(at(rank_0="step-9", rank_1="step-10"))
    assert barrier.heard() == BEGINS + b"step-10"
    assert "save 'step-10' of group \"checkpoint/dcp\" waits: rank 0 at 'step-9'" in caplog.text
    barrier.answers.put(at(rank_0="step-10", rank_1="step-10"))
    assert save.begun() == 1
    save.failed("enough")
    barrier.heard()
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


def test_but_not_for_ever():
    save, barrier = begun(1, "step-10", timeout=0.001)
    save.join(0.01)
    barrier.answers.put(at(rank_0="step-9", rank_1="step-10"))
    with pytest.raises(MusterError, match=r"'step-10' .* is given up: .* since rank 0 at 'step-9'"):
        save.begun()


def test_nobody_waits_for_a_save_that_was_given_up():
    save, barrier = begun(1, "step-10")
    save.give_up()
    barrier.answers.put(at(rank_0="step-9", rank_1="step-10"))
    with pytest.raises(MusterError, match=r"was given up before all had begun it: rank 0 at 'step-9'"):
        save.begun()


def test_one_of_two_names_that_look_alike_comes_first():
    behind = []
    for rank, name in enumerate(("step-1", "step-01")):
        save, barrier = begun(rank, name, timeout=60.0)
        barrier.answers.put(at(rank_0="step-1", rank_1="step-01"))
        barrier.answers.put(decided(Outcome.MEMBER_LOST))
        save.join(PATIENCE)
        behind.append(barrier.said.empty())
    assert sorted(behind) == [False, True]


def test_rank_skips_past_decisions_until_the_barrier_where_the_others_wait():
    save, barrier = begun(1, "step-9")
    for _ in range(2):
        barrier.answers.put(decided(Outcome.TIMED_OUT, 1))
        assert barrier.heard() == BEGINS + b"step-9"
    assert barrier.timeouts == [300.0, LATE, LATE], "they may not wait at all"
    barrier.answers.put(at(rank_0="step-8", rank_1="step-9"))
    assert barrier.heard() == BEGINS + b"step-9"
    assert barrier.timeouts[-1] == 300.0, "who is behind is on his way"
    barrier.answers.put(at(rank_0="step-9", rank_1="step-9"))
    assert save.begun() == 3
    save.failed("enough")
    barrier.heard()
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


@pytest.mark.parametrize(
    ("outcome", "waited", "then"),
    [
        (Outcome.TIMED_OUT, 300.0, LATE),
        (Outcome.TIMED_OUT, LATE, 120.0),
        (Outcome.TIMED_OUT, 120.0, 300.0),
        (Outcome.MEMBER_LOST, LATE, LATE),
    ],
)
def test_where_some_have_waited_in_vain_before_they_are_waited_for_longer(
    outcome: Outcome, waited: float, then: float
):
    """Else ranks that come to their saves a minute apart would miss each other for ever."""
    save, barrier = begun(1, "step-9")
    barrier.answers.put(replace(decided(outcome, 1), wait=waited))
    assert barrier.heard() == BEGINS + b"step-9"
    assert barrier.timeouts == [300.0, then]
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


def ends(save: Commitment, barrier: ScriptedBarrier) -> None:
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


def test_reused_save_name_does_not_show_which_rank_is_behind():
    ends(*begun(1, "last"))
    save, barrier = begun(1, "last", again=True)
    barrier.answers.put(decided(Outcome.MEMBER_LOST, 1))
    with pytest.raises(MemberLostError):
        save.begun()
    assert len(barrier.timeouts) == 1, "it does not go on to where others may make another save"
    ends(*begun(1, "slot-1"))
    save, barrier = begun(1, "slot-0", again=True)
    words: Any = {"rank_0": BEGINS + b"last", "rank_1": BEGINS + REUSED + b"slot-0"}
    barrier.answers.put(decided(**words))
    with pytest.raises(MusterError, match=r"save 'slot-0' .* is given up: .* since rank 0 at 'last'"):
        save.begun()


def test_rank_does_not_wait_for_a_rank_that_reuses_a_save_name():
    save, barrier = begun(1, "step-10")
    words: Any = {"rank_0": BEGINS + REUSED + b"step-9", "rank_1": BEGINS + b"step-10"}
    barrier.answers.put(decided(**words))
    with pytest.raises(MusterError, match=r"save 'step-10' .* is given up: .* since rank 0 at 'step-9'"):
        save.begun()


def test_an_earlier_save_of_the_name_that_others_only_now_give_up_is_not_this_one():
    ends(*begun(0, "last"))
    save, barrier = begun(0, "last", again=True, pace=0.001)
    word = BEGINS + REUSED + b"last"
    both: Any = {"rank_0": word, "rank_1": word}
    barrier.answers.put(decided(**both))
    assert save.begun() == 0
    assert barrier.heard() == NOT_YET
    barrier.answers.put(decided(rank_0=NOT_YET, rank_1=GIVEN_UP))
    assert barrier.heard() == word, "all begin"
    barrier.answers.put(decided(**both))
    save.failed("enough")
    assert barrier.heard() in (NOT_YET, "enough")
    ends(save, barrier)


def test_rank_told_that_the_coordinator_is_away_gives_up_the_save():
    save, barrier = begun(1, "step-9")
    away = OutcomeUnknownError("the coordinator is away", "checkpoint/dcp", 0, Outcome.UNKNOWN)
    barrier.answers.put(away)
    with pytest.raises(OutcomeUnknownError):
        save.begun()
    assert barrier.heard() == BEGINS + b"step-9"
    barrier.answers.put(at(rank_0="step-9", rank_1="step-9"))
    assert barrier.heard() == GIVEN_UP
    barrier.answers.put(decided(rank_1=GIVEN_UP))
    save.join(PATIENCE)


def test_if_they_do_not_its_own_lateness_is_the_reason():
    save, barrier = begun(1, "step-9")
    barrier.answers.put(decided(Outcome.ABORTED, 1))
    barrier.answers.put(decided(Outcome.TIMED_OUT, 0))
    with pytest.raises(BarrierAbortedError):
        save.begun()


def test_interrupt_while_waiting_for_other_ranks_fails_the_save_for_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
):
    save, barrier = begun(0, "step-9")
    with monkeypatch.context() as patch:
        patch.setattr(save._changed, "wait_for", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save.begun()
    barrier.answers.put(at(rank_0="step-9", rank_1="step-9"))
    assert "KeyboardInterrupt" in str(barrier.heard())
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


def test_an_interruption_at_the_very_beginning_leaves_no_two_saves_beside_each_other(
    monkeypatch: pytest.MonkeyPatch,
):
    barrier = ScriptedBarrier(0)
    as_barrier: Any = barrier

    def interrupted(*arguments: Any) -> None:
        start_thread(*arguments)
        assert barrier.heard() == BEGINS + b"step-9"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "start_thread", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Commitment(as_barrier, 60.0, name="step-9")
    second = in_thread(lambda: Commitment(as_barrier, 60.0, name="step-10"))
    assert not second.done()
    barrier.answers.put(at(rank_0="step-9", rank_1="step-9"))
    assert barrier.heard() == GIVEN_UP
    barrier.answers.put(decided(rank_0=GIVEN_UP, rank_1=DONE))
    assert second.result(PATIENCE).number == 2
    barrier.answers.put(decided(Outcome.MEMBER_LOST))


def test_of_a_thread_that_never_began_nobody_waits_for_the_end(monkeypatch: pytest.MonkeyPatch):
    barrier = ScriptedBarrier(0)
    as_barrier: Any = barrier
    with monkeypatch.context() as patch:
        patch.setattr(module, "start_thread", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            Commitment(as_barrier, 60.0)
    save = Commitment(as_barrier, 60.0, name="step-9")
    assert barrier.heard() == BEGINS + b"step-9"
    barrier.answers.put(decided(Outcome.MEMBER_LOST))
    save.join(PATIENCE)
