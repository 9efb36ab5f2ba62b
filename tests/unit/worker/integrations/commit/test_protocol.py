"""The protocol of a save as a pure state machine: ranks in any order, without threads and without a clock."""

import enum
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.worker.decision import Decision, Failure, MissingRank, MissingState, Outcome
from muster.worker.errors import MusterError, OutcomeUnknownError
from muster.worker.groups.write_report import WriteReport
from muster.worker.integrations.commit.protocol import OVERDUE, Ballot, SaveProtocol, Stage, Terms
from muster.worker.integrations.commit.words import BEGINS, DONE, GIVEN_UP, NOT_YET

TIMEOUT = 60.0
PARTS = 2


class Does(enum.Enum):
    """What happens on a rank between two barriers."""

    WRITES = enum.auto()
    WAITS = enum.auto()
    FAILS = enum.auto()
    GIVES_UP = enum.auto()
    DIES = enum.auto()


def protocol(rank: int = 0, name: str = "step-1", parts: int = 1) -> SaveProtocol:
    terms = Terms("save", "job", rank, 0, BEGINS + name.encode(), TIMEOUT, parts=parts)
    return SaveProtocol(terms, WriteReport(), 0.0)


def decided(outcome: Outcome = Outcome.RELEASED, words: dict[int, bytes] | None = None) -> Decision:
    return Decision("save", 0, outcome, outcome.value, payloads=words or {})


class World:
    """Ranks that make one save, and the barriers that they meet at."""

    def __init__(self, names: list[str]) -> None:
        self.ranks = [protocol(rank, name, PARTS) for rank, name in enumerate(names)]
        self.names = names
        self.now = 0.0
        self.dead: set[int] = set()
        self.committed = False
        self.heard_written = [0] * len(names)
        """By rank: the parts that it has done."""

    def act(self, rank: int, does: Does) -> None:
        save = self.ranks[rank]
        if rank in self.dead or save.is_over:
            return
        match does:
            case Does.WRITES if save.stage is Stage.WRITING and self.heard_written[rank] == len(save.agreed):
                self.heard_written[rank] = save.part_done(self.now)
            case Does.WRITES if save.stage is Stage.CONFIRMING and rank == 0 and save.failure is None:
                save.claim()
                self.check_whole()
                self.committed = True
                save.commit()
            case Does.FAILS:
                if not self.committed:
                    save.fail("the disk is full")
            case Does.GIVES_UP:
                save.give_up()
            case Does.DIES:
                self.dead.add(rank)
            case _:
                pass

    def check_whole(self) -> None:
        assert self.heard_written == [PARTS] * len(self.ranks), "rank 0 commits what not all have written"
        assert len(set(self.names)) == 1, "rank 0 commits parts of different saves"

    def meet(self) -> None:
        """Let all living ranks vote at one barrier, and hear what was decided there."""
        living = [rank for rank in range(len(self.ranks)) if rank not in self.dead]
        ballots = {rank: self.vote(rank) for rank in living}
        if not any(ballots.values()):
            return
        said = {rank: ballot for rank, ballot in ballots.items() if ballot is not None}
        decision = self.decide(said)
        for rank in said:
            self.ranks[rank].heard(decision, self.now)

    def vote(self, rank: int) -> Ballot | None:
        save = self.ranks[rank]
        if (ballot := save.next_vote(self.now)) is None and not save.is_over:
            self.now = max(self.now, save.speaks_at)
            ballot = save.next_vote(self.now)
            assert ballot is not None, "a rank keeps silent though its time has come"
        assert ballot is None or not save.is_over
        return ballot

    def decide(self, said: dict[int, Ballot]) -> Decision:
        failures = tuple(Failure(r, "here", 7, one.failure) for r, one in said.items() if one.failure)
        if failures:
            return replace(decided(Outcome.ABORTED), failures=failures)
        absent = [rank for rank in range(len(self.ranks)) if rank not in said]
        if absent:
            missing = tuple(MissingRank(r, "here", 7, MissingState.NOT_ARRIVED, 0.0) for r in absent)
            return replace(decided(Outcome.MEMBER_LOST), missing=missing)
        return decided(words={rank: one.word for rank, one in said.items() if one.word})


RANKS = 3
ROUNDS = st.lists(st.tuples(*[st.sampled_from(Does)] * RANKS), max_size=6)
NAMES = st.lists(st.sampled_from(["step-1", "step-1", "step-1", "step-2"]), min_size=RANKS, max_size=RANKS)


@given(names=NAMES, rounds=ROUNDS)
def test_save_ends_alike_on_all_ranks_whatever_they_do(names: list[str], rounds: list[tuple[Does, ...]]):
    world = World(names)
    for actions in rounds:
        world.meet()
        for rank, does in enumerate(actions):
            world.act(rank, does)
    for _ in range(40):
        world.meet()
        for rank in range(RANKS):
            world.act(rank, Does.WRITES)
    living = [save for rank, save in enumerate(world.ranks) if rank not in world.dead]
    assert all(save.is_over for save in living), "a rank waits for ever"
    assert all(save.next_vote(world.now) is None for save in living)
    confirmed = [save.reason is None for save in living]
    assert world.committed or not any(confirmed), "a rank takes for a checkpoint what is none"
    if world.committed and not world.dead and Does.GIVES_UP not in {d for one in rounds for d in one}:
        assert all(confirmed)


@given(rounds=st.lists(st.tuples(*[st.sampled_from([Does.WRITES, Does.WAITS])] * RANKS), max_size=12))
def test_save_is_committed_when_no_rank_fails(rounds: list[tuple[Does, ...]]):
    world = World(["step-1"] * RANKS)
    for actions in [*rounds, *[(Does.WRITES,) * RANKS] * 8]:
        world.meet()
        for rank, does in enumerate(actions):
            world.act(rank, does)
    assert world.committed or any(save.failure for save in world.ranks)
    if world.committed:
        world.meet()
        assert [save.stage for save in world.ranks] == [Stage.OVER] * RANKS
        assert [save.reason for save in world.ranks] == [None] * RANKS


def test_stages_follow_one_another():
    save, stages = protocol(), []
    word = BEGINS + b"step-1"
    assert save.next_vote(0.0) == Ballot(None, word, TIMEOUT, WriteReport())
    save.heard(decided(words={0: word, 1: word}), 1.0)
    stages.append(save.stage)
    assert save.next_vote(1.0) is None
    save.part_done(3.0)
    assert save.next_vote(3.0) == Ballot(None, DONE, TIMEOUT, WriteReport(seconds=2.0))
    save.heard(decided(), 3.0)
    stages.append(save.stage)
    assert save.next_vote(3.0) is None, "rank 0 has not committed yet"
    save.claim()
    save.commit()
    assert save.next_vote(3.0) == Ballot(None, DONE, TIMEOUT, WriteReport(seconds=2.0, commits=True))
    save.heard(decided(), 3.0)
    stages.append(save.stage)
    assert save.next_vote(9e9) is None
    assert stages == [Stage.WRITING, Stage.CONFIRMING, Stage.OVER]


def writing() -> SaveProtocol:
    save = protocol()
    save.heard(decided(words={0: BEGINS + b"step-1"}), 0.0)
    return save


def test_rank_votes_not_yet_less_often_each_time():
    save, gaps, now = writing(), [], 0.0
    for _ in range(3):
        gaps.append(save.speaks_at - now)
        now = save.speaks_at
        ballot = save.next_vote(now)
        assert ballot is not None
        assert ballot.word == NOT_YET
        save.heard(decided(words={0: NOT_YET}), now)
    assert gaps == [10.0, 20.0, 20.0], "at most a third of the timeout"


def test_rank_fails_when_it_is_overdue_unless_it_commits():
    save = writing()
    ballot = save.next_vote(TIMEOUT)
    assert ballot is not None
    assert ballot.failure == f"{OVERDUE} 60 s"
    save = writing()
    save.part_done(0.0)
    save.heard(decided(), 0.0)
    save.claim()
    ballot = save.next_vote(TIMEOUT)
    assert ballot is not None
    assert (ballot.failure, ballot.word) == (None, NOT_YET)


def test_unknown_outcome_is_a_reason_only_until_the_decision():
    save = writing()
    save.not_heard(OutcomeUnknownError("away", "save", 1, Outcome.UNKNOWN))
    assert isinstance(save.reason, OutcomeUnknownError)
    save.heard(decided(words={0: NOT_YET}), 0.0)
    assert save.reason is None


@pytest.mark.parametrize("outcome", [Outcome.ABORTED, Outcome.MEMBER_LOST, Outcome.TIMED_OUT])
def test_failed_save_is_not_claimed(outcome: Outcome):
    save = writing()
    notice = save.heard(decided(outcome), 0.0)
    assert notice is not None
    assert notice.rank_lost == (outcome is not Outcome.ABORTED)
    with pytest.raises(MusterError, match="has failed for all ranks before it was committed"):
        save.claim()


def test_save_that_a_rank_gave_up_is_over():
    save = writing()
    save.heard(decided(words={1: GIVEN_UP}), 0.0)
    assert save.is_over
    assert "ended on ranks [1] before they were done" in str(save.reason)
