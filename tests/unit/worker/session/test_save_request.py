"""What a process knows of a request for a save, however often that is announced."""

from hypothesis import given
from hypothesis import strategies as st

from muster.client.save_votes import PREFIX
from muster.worker.decision import Decision, Outcome
from muster.worker.savepoint.agreement import Course, Next
from muster.worker.session.save_request import SaveAsked, time_left

deadlines = st.none() | st.integers(1, 200).map(float)


def asked(
    number: int = 1, deadline: float | None = None, *, stop: bool = False, withdrawn: bool = False
) -> SaveAsked:
    return SaveAsked(number, 0, stop, "asked for by ann", withdrawn, deadline)


@given(st.lists(deadlines, min_size=1))
def test_earliest_announced_deadline_counts(announced: list[float | None]):
    known: SaveAsked | None = None
    for position, deadline in enumerate(announced):
        before, known = known, asked(deadline=deadline).after(known, 0.0)
        heard = [one for one in announced[: position + 1] if one is not None]
        assert known.deadline == min(heard, default=None)
        # The thread of a save point wakes for another object.
        assert before is None or (known is before) is (known.deadline == before.deadline)


def test_new_deadline_counts_when_the_one_before_has_passed():
    known = asked(deadline=50.0)
    assert asked(deadline=90.0).after(known, now=49.0) is known
    assert asked(deadline=90.0).after(known, now=50.0).deadline == 90.0


@given(deadlines, deadlines)
def test_another_request_has_its_own_deadline(before: float | None, after: float | None):
    assert asked(2, after).after(asked(1, before), 0.0) == asked(2, after)


@given(deadlines, deadlines)
def test_withdrawal_of_a_request_is_always_heard(before: float | None, after: float | None):
    known = asked(deadline=after, withdrawn=True).after(asked(deadline=before), 0.0)
    assert known.withdrawn
    assert Course(2, 0).deadline(known) is None


@given(st.lists(deadlines), st.booleans())
def test_repeated_request_is_agreed_on_once(announced: list[float | None], released: bool):
    course, known = Course(1, 0), asked(deadline=500.0)
    assert course.wants(known)
    course.promise(7)
    outcome = Outcome.RELEASED if released else Outcome.MEMBER_LOST
    course.agreed(Decision(PREFIX, 0, outcome, "", payloads={0: course.payload(known)}))
    if released:
        assert course.after(9) is Next.SAVE
        course.finished(Decision(PREFIX, 1, outcome, "", payloads={0: course.payload(known)}))
    for deadline in announced:
        known = asked(deadline=deadline).after(known, 0.0)
        assert not course.wants(known)
        # All have saved; or the request is left to the job's next generation, and its deadline still stands.
        assert course.deadline(known) == (None if released else known.deadline)


def test_time_left_ends_the_sentence_of_a_request():
    assert time_left(asked(), 10.0) == ""
    assert time_left(asked(deadline=97.4), 10.0) == "; 87 s left"
    assert time_left(asked(deadline=10.4), 10.0) == "; no time is left"
    assert time_left(asked(deadline=9.0), 10.0) == "; no time is left"
