"""One save of all ranks, without a coordinator: this rank's votes and the decisions on them."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.worker.decision import Outcome
from muster.worker.group_barrier import GroupBarrier
from muster.worker.groups.write_report import WriteReport
from muster.worker.integrations.commit import commitment as module
from muster.worker.integrations.commit.commitment import Commitment
from muster.worker.integrations.commit.words import BEGINS, DONE, GIVEN_UP, NOT_YET, step_of
from tests.support.expect import some
from tests.support.rendezvous_runs import in_thread
from tests.support.saves.scripted_barrier import ScriptedBarrier, decided
from tests.unit.worker.integrations.commit.scripted_saves import begun, written_by_all


def test_signal_handler_may_end_a_save_that_is_not_made_yet(monkeypatch: pytest.MonkeyPatch):
    found: list[Commitment] = []

    def interrupted(group: object, name: bytes) -> bool:
        (last,) = module._last.values()
        last.give_up()
        last.check_reached()
        found.append(last)
        return False

    monkeypatch.setattr(module, "_goes_up", interrupted)
    save, _ = begun()
    assert found == [save]
    assert save.begun() == 0
    save.give_up()


def test_all_write_and_rank_0_commits():
    save, barrier = begun()
    result = in_thread(save.written)
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    assert result.result(PATIENCE).outcome is Outcome.RELEASED
    assert barrier.said.empty(), "it is not committed yet"
    save.committed()
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    save.join(PATIENCE)
    assert barrier.said.empty()


def test_another_rank_hears_of_the_commit_and_it_is_the_same_to_it_whether_its_writer_is_dropped():
    save, barrier = begun(rank=1)
    result = in_thread(save.written)
    assert barrier.heard() == DONE
    save.give_up()
    barrier.answers.put(decided())
    result.result(PATIENCE)
    for word in (NOT_YET, DONE):
        assert barrier.heard() == DONE
        barrier.answers.put(decided(rank_0=word))
    save.join(PATIENCE)
    assert barrier.said.empty()


def test_all_may_wait_for_the_commit():
    save, barrier = written_by_all(rank=1)
    result = in_thread(save.confirmed)
    assert barrier.heard() == DONE
    assert not result.done()
    barrier.answers.put(decided())
    result.result(PATIENCE)
    assert save.ending(PATIENCE) is None


def test_votes_of_a_save_report_its_step_and_size_and_the_last_one_commits(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    barrier = ScriptedBarrier()
    as_barrier: Any = barrier
    save = Commitment(as_barrier, 60.0, name="checkpoint-500")
    assert barrier.heard() == BEGINS + b"checkpoint-500"
    barrier.answers.put(decided(rank_0=BEGINS + b"checkpoint-500"))
    save.begun()
    now[0] += 12.5
    result = in_thread(partial(save.written, 4096))
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    result.result(PATIENCE)
    save.committed()
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    save.join(PATIENCE)
    begin, written = WriteReport(step=500), WriteReport(step=500, seconds=12.5, bytes=4096)
    assert barrier.reports == [begin, written, replace(written, commits=True)]


def test_rank_0_that_has_not_committed_yet_does_not_report_a_commit():
    save, barrier = begun(pace=0.001)
    result = in_thread(save.written)
    assert heard_at_last(barrier) == DONE
    barrier.answers.put(decided())
    result.result(PATIENCE)
    assert barrier.heard() == NOT_YET
    save.failed("the disk is full")
    barrier.answers.put(decided(rank_0=NOT_YET))
    assert heard_at_last(barrier) == "the disk is full"
    assert not any(some(report).commits for report in barrier.reports)
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


def test_rank_that_gives_up_reports_it():
    save, barrier = begun()
    save.give_up()
    assert barrier.heard() == GIVEN_UP
    barrier.answers.put(decided(rank_0=GIVEN_UP))
    save.join(PATIENCE)
    assert [some(report).gives_up for report in barrier.reports] == [False, True]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-9", 9),
        ("step 9", 9),
        ("checkpoint-500", 500),
        ("global_step0100", 100),
        ("epoch=1-step=500-v2.ckpt", 500),
        ("iter_0000500", 500),
        ("checkpoints-2026/step-7", 7),
        ("", None),
        ("final", None),
        ("epoch-3", None),
        ("2026-11-24", None),
        ("step-99999999999999999999", None),
    ],
)
def test_step_of_a_save_is_read_off_its_name(name: str, step: int | None):
    assert step_of(name) == step


def heard_at_last(barrier: ScriptedBarrier) -> bytes | str:
    """What it says when it does not say any more that it is not done."""
    while (said := barrier.heard()) == NOT_YET:
        barrier.answers.put(decided(rank_0=NOT_YET))
    return said


def test_slow_rank_votes_not_yet_and_ranks_meet_again_until_all_have_written():
    save, barrier = begun(pace=0.001)
    assert barrier.heard() == NOT_YET
    result = in_thread(save.written)
    barrier.answers.put(decided(rank_0=NOT_YET))
    assert heard_at_last(barrier) == DONE
    barrier.answers.put(decided(rank_1=NOT_YET))
    assert not result.done()
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    assert result.result(PATIENCE).outcome is Outcome.RELEASED
    save.failed("the disk is full")
    assert heard_at_last(barrier) == "the disk is full", "rank 0 could not commit"
    barrier.answers.put(decided(Outcome.ABORTED))
    save.join(PATIENCE)


def test_unknown_on_lost_value_is_refused():
    barrier: Any = ScriptedBarrier()
    with pytest.raises(ValueError, match='on_lost = \'exit\': it must be "raise" or "abort"'):
        Commitment(barrier, 60.0, on_lost="exit")  # type: ignore[arg-type]


def test_it_asks_of_a_barrier_what_ours_has():
    for name in ("prefix", "world_size", "run_id", "generation", "rank", "sequence", "vote"):
        assert hasattr(GroupBarrier, name) or name in GroupBarrier.__doc__, name  # type: ignore[operator]


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_that_is_no_time_is_refused_before_anyone_waits(timeout: float):
    barrier: Any = ScriptedBarrier()
    with pytest.raises(ValueError, match=r"timeout = .*: it must be a finite number of seconds above 0"):
        Commitment(barrier, timeout)


def test_no_rank_begins_a_part_before_all_have_done_the_one_before():
    save, barrier = begun(rank=1, parts=2)
    first = in_thread(save.written)
    assert barrier.heard() == DONE
    assert not first.done()
    barrier.answers.put(decided())
    first.result(PATIENCE)
    assert barrier.said.empty(), "the second part is not done yet"
    second = in_thread(save.written)
    assert barrier.heard() == DONE
    assert not second.done()
    barrier.answers.put(decided())
    assert second.result(PATIENCE).sequence > first.result(PATIENCE).sequence
    confirmed = in_thread(save.confirmed)
    assert barrier.heard() == DONE
    barrier.answers.put(decided())
    confirmed.result(PATIENCE)
