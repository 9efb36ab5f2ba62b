from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.watcher.notice import Notice
from muster.watcher.schedule import FIRST_BACKOFF, MAX_BACKOFF, REPEAT, Schedule


def notice(name: str = "a", reason: str = "why", deadline: float | None = None) -> Notice:
    return Notice(id=name, reason=reason, deadline=deadline)


def sent_at(schedule: Schedule, now: float) -> list[Notice]:
    return [one.notice for one in schedule.begin_due(now)]


def test_new_notice_is_due_at_once():
    schedule = Schedule()
    assert schedule.report("s", [notice()], 5.0).new == [notice()]
    assert schedule.next_due() == 5.0
    assert sent_at(schedule, 5.0) == [notice()]
    assert sent_at(schedule, 100.0) == [], "it is on its way"


def test_answered_notice_is_repeated():
    schedule = Schedule()
    schedule.report("s", [notice()], 0.0)
    (standing,) = schedule.begin_due(0.0)
    assert schedule.answered(standing, ("job", 1), 1.0)
    assert schedule.next_due() == 1.0 + REPEAT
    assert sent_at(schedule, REPEAT) == []
    (standing,) = schedule.begin_due(1.0 + REPEAT)
    assert not schedule.answered(standing, ("job", 1), 12.0), "the same answer is no news"
    (standing,) = schedule.begin_due(12.0 + REPEAT)
    assert schedule.answered(standing, ("job", 2), 23.0)


def test_failed_notice_is_repeated_with_growing_pauses():
    schedule, now = Schedule(), 0.0
    pauses: list[float] = []
    schedule.report("s", [notice()], now)
    for _ in range(8):
        (standing,) = schedule.begin_due(now)
        assert schedule.failed(standing, "unreachable", now) == (not pauses)
        due = schedule.next_due()
        assert due is not None
        pauses.append(due - now)
        now = due
    assert pauses == [FIRST_BACKOFF * 2**n for n in range(5)] + [MAX_BACKOFF] * 3
    (standing,) = schedule.begin_due(now)
    assert schedule.answered(standing, (), now)
    assert schedule.next_due() == now + REPEAT


@pytest.mark.parametrize("changed", [notice(deadline=9.0), notice(reason="another")])
def test_changed_notice_is_due_at_once(changed: Notice):
    schedule = Schedule()
    schedule.report("s", [notice()], 0.0)
    (standing,) = schedule.begin_due(0.0)
    schedule.answered(standing, (), 0.0)
    changes = schedule.report("s", [changed], 3.0)
    assert (changes.new, changes.changed, changes.withdrawn) == ([], [changed], [])
    assert sent_at(schedule, 3.0) == [changed]


def test_notice_that_changes_on_its_way_is_sent_again():
    schedule = Schedule()
    schedule.report("s", [notice()], 0.0)
    (standing,) = schedule.begin_due(0.0)
    schedule.report("s", [notice(deadline=9.0)], 1.0)
    assert sent_at(schedule, 1.0) == []
    schedule.failed(standing, "unreachable", 2.0)
    assert sent_at(schedule, 2.0) == [notice(deadline=9.0)]


def test_withdrawn_notice_is_not_sent_again():
    schedule = Schedule()
    schedule.report("s", [notice("a"), notice("b")], 0.0)
    standing, _ = schedule.begin_due(0.0)
    assert schedule.report("s", [notice("b")], 1.0).withdrawn == [notice("a")]
    schedule.answered(standing, (), 2.0)
    assert schedule.in_force("s") == 1
    assert sent_at(schedule, 100.0) == []


def test_sources_do_not_withdraw_each_others_notices():
    schedule = Schedule()
    schedule.report("s", [notice("a")], 0.0)
    assert schedule.report("t", [], 0.0).withdrawn == []
    assert sent_at(schedule, 0.0) == [notice("a")]


NOTICES = st.lists(
    st.builds(notice, st.sampled_from("abc"), st.sampled_from(["r", "q"]), st.sampled_from([None, 7.0])),
    max_size=4,
    unique_by=lambda one: one.id,
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("report"), st.sampled_from("st"), NOTICES),
        st.tuples(st.just("pass"), st.floats(0.1, 40.0), st.booleans()),
    ),
    max_size=30,
)


@given(STEPS)
def test_coordinator_hears_each_notice_in_force_at_once_and_then_regularly(steps: list[tuple[Any, Any, Any]]):
    """Whatever is reported in whatever order, while the coordinator answers or fails."""
    schedule, now = Schedule(), 0.0
    in_force: dict[tuple[str, str], Notice] = {}
    tried: dict[tuple[str, str], tuple[Notice, float]] = {}
    for step in steps:
        if step[0] == "report":
            _, source, notices = step
            changes = schedule.report(source, notices, now)
            before = {key: one for key, one in in_force.items() if key[0] == source}
            after = {(source, one.id): one for one in notices}
            assert changes.new == [one for key, one in after.items() if key not in before]
            assert changes.withdrawn == [one for key, one in before.items() if key not in after]
            in_force = {key: one for key, one in in_force.items() if key[0] != source} | after
        else:
            _, seconds, answers = step
            now += seconds
        for standing in schedule.begin_due(now):
            assert standing.sending is not None
            assert in_force[standing.source, standing.notice.id] == standing.sending
            tried[standing.source, standing.notice.id] = standing.sending, now
            if step[0] == "pass" and not answers:
                schedule.failed(standing, "no", now)
            else:
                schedule.answered(standing, "yes", now)
        assert (schedule.next_due() is None) == (not in_force)
        for key, one in in_force.items():
            sent, at = tried[key]
            assert sent == one
            assert now - at < max(REPEAT, MAX_BACKOFF)
        tried = {key: value for key, value in tried.items() if key in in_force}
