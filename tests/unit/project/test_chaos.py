"""The harness of the chaos tests, and their judges: each must find what is wrong in a history."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.chaos import local_torchrun_chaos
from tests.support.chaos.adapter_chaos import Committed
from tests.support.chaos.harness import DrawnFaults, option
from tests.support.chaos.local_chaos import Model
from tests.support.chaos.replica_chaos import wrong_changes, wrong_rounds
from tests.support.saves.save_history import Event


@dataclass(kw_only=True)
class Small(DrawnFaults):
    """Three faults that only write down their names."""

    BROKEN = "broken_nothing"
    PROGRAM = ("program",)
    BETWEEN = 0.0

    fails_at: int = option(-1, "the fault whose recovery fails")
    did: list[str] = field(init=False, default_factory=list)

    def open(self, folder: Path, stack: ExitStack) -> None:
        stack.callback(self.did.append, "ended")

    def kinds(self) -> tuple[Callable[[], None], ...]:
        return (self.one, self.two, self.three)

    def one(self) -> None:
        self.did.append("one")

    def two(self) -> None:
        self.did.append("two")

    def three(self) -> None:
        self.did.append("three")

    def recover(self) -> None:
        assert len(self.did) != self.fails_at, "nobody leads"

    def judge(self) -> None:
        self.wrong.append(f"{len(self.did)} faults")

    def stacks(self) -> str:
        return "in accept()"


def test_each_kind_of_fault_comes_once_before_any_comes_again(tmp_path: Path):
    chaos = Small(seed=3, faults=7).run(tmp_path)
    for first in (0, 3):
        assert sorted(chaos.did[first : first + 3]) == ["one", "three", "two"]
    assert chaos.injected.total() == 7
    assert chaos.did[-1] == "ended"
    assert chaos.wrong == ["7 faults"]
    assert "WRONG: 7 faults" in chaos.account()


def test_seed_draws_the_same_faults_again(tmp_path: Path):
    histories = [Small(seed=seed, faults=30).run(tmp_path).did for seed in (5, 5, 6)]
    assert histories[0] == histories[1] != histories[2]


def test_only_the_named_faults_are_drawn(tmp_path: Path):
    assert Small(seed=3, faults=2, only=("two",)).run(tmp_path).did == ["two", "two", "ended"]


def test_run_that_fails_shows_its_account_and_stacks(tmp_path: Path):
    chaos = Small(seed=3, faults=7, fails_at=2)
    with pytest.raises(AssertionError, match="nobody leads") as error:
        chaos.run(tmp_path)
    (note,) = error.value.__notes__
    assert "seed 3" in note
    assert "in accept()" in note
    assert chaos.did[-1] == "ended"


def test_built_in_fault_replaces_the_program():
    assert Small().program == ("program",)
    assert Small(broken="late").program[1:] == ("-m", "tests.support.chaos.broken_nothing", "late")


# ---------------------------------------------------------------------- judges


@pytest.mark.parametrize(
    ("heard", "wrong"),
    [
        (["step 3, local", "step 2, local"], "did not resume from the same"),
        (["step 2, local"] * 2, "the model allows ['step 3, local']"),
        (["step 3, shared"] * 2, "the model allows ['step 3, local']"),
        (["wrong bits of step 3"] * 2, "the model allows ['step 3, local']"),
        (["nothing"] * 2, "the model allows ['step 3, local']"),
        (["step 3, local"] * 2, ""),
    ],
)
def test_local_model_finds_a_wrong_resumption(heard: list[str], wrong: str):
    model = Model()
    model.saved(2, "replicated")
    model.saved(3, "local")
    found = model.resumed(heard)
    assert [wrong in one for one in found] == ([True] if wrong else [])


def test_local_model_allows_steps_since_the_last_copy_if_a_node_was_hurt():
    for step, right in ((1, False), (2, True), (3, True)):
        model = Model()
        model.saved(2, "replicated")
        model.saved(3, "local")
        model.is_hurt = True
        assert (model.resumed([f"step {step}, local"] * 2) == []) is right


def seen_by_two(*events: tuple[int, int, str, int, str], hurt_after: int | None = None) -> list[str]:
    """Return what the model of a job of two ranks finds wrong.

    Args:
        events: the round, the rank, what it saw, the step, and a text: of a resumption, where it came from
            and in which round it was saved.
        hurt_after: after so many events, a node loses its files.
    """
    model, wrong = local_torchrun_chaos.Model(2), list[str]()
    for number, (round, rank, what, step, text) in enumerate(events):
        if number == hurt_after:
            assert model.is_copied
            model.hurt()
            assert not model.is_copied
        text, _, saved_round = text.partition(" ")
        wrong += model.see(Event(rank, what, step, saved_round, round, text))
    return wrong


def both(round: int, what: str, step: int, text: str = "") -> list[tuple[int, int, str, int, str]]:
    return [(round, rank, what, step, text) for rank in (0, 1)]


FIRST_ROUND = (
    *both(0, "resumed", 0, "local 0"),
    *(one for step in (4, 8, 12, 16) for one in both(0, "scheduled", step)),
    *both(0, "finalized", 8, "replicated"),
    (0, 0, "finalized", 12, "local"),
)
HURT = len(FIRST_ROUND)


@pytest.mark.parametrize(
    ("step", "text", "hurt_after", "wrong"),
    [
        (12, "local 0", None, ""),
        (16, "local 0", None, ""),
        (8, "local 0", None, "the model allows [12, 16]"),
        (20, "local 0", None, "the model allows [12, 16]"),
        (12, "shared 0", None, "from shared storage"),
        (8, "local 0", HURT, ""),
        (12, "local 0", HURT, ""),
        (4, "local 0", HURT, "the model allows [8, 12, 16]"),
        (0, "local 0", HURT, "the model allows [8, 12, 16]"),
    ],
)
def test_model_of_rounds_finds_a_wrong_resumption(step: int, text: str, hurt_after: int | None, wrong: str):
    found = seen_by_two(*FIRST_ROUND, (1, 0, "resumed", step, text), hurt_after=hurt_after)
    assert [wrong in one for one in found] == ([True] if wrong else [])


def test_model_of_rounds_finds_ranks_on_different_steps_and_wrong_bits():
    resumed = ((1, 0, "resumed", 16, "local 0"), (1, 1, "resumed", 12, "local 0"))
    (different,) = seen_by_two(*FIRST_ROUND, *resumed)
    assert different == "rank 1 of round 1 resumed from step 12, and others from {0: 16}"
    (bits,) = seen_by_two(*FIRST_ROUND, (1, 0, "wrong", 12, "not all bits are right"))
    assert bits == "rank 0 resumed from step 12 in round 1: not"


def test_model_of_rounds_allows_no_older_step_again_once_there_are_copies():
    lost = (*FIRST_ROUND, *both(1, "resumed", 8, "local 0"), *both(1, "scheduled", 12))
    early = (*lost, (1, 0, "finalized", 12, "local"), (2, 0, "resumed", 8, "local 0"))
    assert seen_by_two(*early, hurt_after=HURT) == []
    copied = (*lost, *both(1, "finalized", 12, "replicated"))
    (late,) = seen_by_two(*copied, (2, 0, "resumed", 8, "local 0"), hurt_after=HURT)
    assert "the model allows [12]" in late


def test_model_of_rounds_finds_an_abandoned_step_that_comes_back():
    lost = (*FIRST_ROUND, *both(1, "resumed", 8, "local 0"), *both(1, "scheduled", 12))
    (gone,) = seen_by_two(*lost, (2, 0, "resumed", 16, "local 0"), hurt_after=HURT)
    assert "the model allows [8, 12]" in gone
    (stale,) = seen_by_two(*lost, (2, 0, "resumed", 12, "local 0"), hurt_after=HURT)
    assert stale == "rank 0 of round 2 resumed from step 12 of round 0, not 1"


@pytest.mark.parametrize(
    ("zero", "one", "wrong"),
    [
        (["resumed 3", "saved 4"], ["resumed 3", "saved 4"], ""),
        (["resumed 4 whole", "saved 5"], ["resumed 4 whole"], ""),
        (["resumed 3", "saved 4"], ["resumed 2", "saved 3"], "one and the same step"),
        (["resumed 2 3"], ["resumed 2 3"], "one and the same step"),
        (["saved 4"], ["saved 4"], "one and the same step"),
        (["resumed 2"], ["resumed 2"], "the ranks resumed from 2, and 3 was committed"),
        (["resumed 5"], ["resumed 5"], "the ranks resumed from 5, and 3 was committed"),
        (["resumed 3", "mixed 4"], ["resumed 3"], "mixed 4"),
        (["resumed 3", "saved 5"], ["resumed 3"], "the steps [5] were saved after 3"),
    ],
)
def test_judge_of_an_adapter_finds_a_wrong_generation(zero: list[str], one: list[str], wrong: str):
    committed = Committed()
    assert committed.judge([["saved 1", "saved 2", "saved 3"], ["saved 1", "saved 2"]]) == []
    found = committed.judge([zero, one])
    assert any(wrong in text for text in found) if wrong else found == []


def test_judge_of_a_store_finds_a_change_that_is_lost_or_made_twice():
    answers = {0: ([1, 3], 2), 1: ([2], 1)}
    assert wrong_changes(answers, {0: "1;2;", 1: "1;"}) == []
    for log in ("1;", "1;2;2;"):
        (lost,) = wrong_changes(answers, {0: log, 1: "1;"})
        assert lost == "client 0 appended 2 times, and that is not what is there"
    (doubled,) = wrong_changes({0: ([1, 2], 2), 1: ([2], 1)}, {0: "1;2;", 1: "1;"})
    assert "their sums are not 1 to that" in doubled


def test_judge_of_rounds_finds_a_rank_that_is_given_twice_and_a_round_that_comes_again():
    assert wrong_rounds({0: [(0, 0, 3), (1, 1, 3)], 1: [(0, 1, 3)], 2: [(0, 2, 3)]}) == []
    assert wrong_rounds({0: [(0, 0, 3)], 1: [(0, 0, 3)]}) == ["round 0 gave rank 0 to the nodes 0 and 1"]
    assert wrong_rounds({0: [(1, 0, 3), (0, 0, 3)]}) == ["node 0 was in the rounds [1, 0]"]
    assert wrong_rounds({0: [(0, 3, 3)]}) == ["round 0 gave node 0 rank 3 of 3"]
