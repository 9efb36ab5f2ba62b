"""The judge is judged: every fault that is seeded into a good history is found."""

import pytest

from tests.support.world import history
from tests.support.world.history import Arrived, Heard, Joined, RankProcess, violations

A0 = RankProcess("job1", 0, "a0", born=1)
A1 = RankProcess("job1", 1, "a1", born=2)
B1 = RankProcess("job1", 1, "b1", born=3)
BOTH = (0, 1)


def arrived(process, sequence):
    return Arrived(process, "ckpt", sequence, payload=f"{process.rank}")


def heard(process, sequence, outcome=history.RELEASED, message="well", missing=()):
    payloads = {0: "0", 1: "1"} if outcome == history.RELEASED else {}
    return Heard(process, "ckpt", sequence, outcome, message, missing, payloads)


def a_good_history():
    """Released, timed out without rank 1, then rank 1 restarted, and released again."""
    late = {"outcome": history.TIMED_OUT, "message": "late", "missing": (1,)}
    return [
        Joined(A0, "ckpt", 0, BOTH),
        Joined(A1, "ckpt", 0, BOTH),
        arrived(A0, 0),
        arrived(A0, 0),
        arrived(A1, 0),
        heard(A0, 0),
        heard(A1, 0),
        arrived(A0, 1),
        heard(A0, 1, **late),
        arrived(A1, 1),
        heard(A1, 1, **late),
        arrived(A1, 2),
        Joined(B1, "ckpt", 2, BOTH),
        arrived(B1, 2),
        arrived(A0, 2),
        heard(A0, 2),
        heard(B1, 2),
    ]


def broken_rules(events):
    return {sentence.split(":")[0] for sentence in violations(events)}


def test_good_history_passes():
    history.assert_good(a_good_history())


def test_history_survives_being_written_down():
    good = a_good_history()
    assert history.from_lines(map(history.to_line, good)) == good


def seeded(name):
    events = a_good_history()
    match name:
        case "two outcomes":
            events[6] = heard(A1, 0, history.TIMED_OUT, "late", (1,))
        case "two messages":
            events[6] = heard(A1, 0, message="other")
        case "two lists of missing":
            events[10] = heard(A1, 1, history.TIMED_OUT, "late", (0,))
        case "two payloads":
            events[6] = Heard(A1, "ckpt", 0, history.RELEASED, "well", (), {0: "x", 1: "1"})
        case "released without a rank":
            del events[4]
            del events[5]
        case "released without having arrived":
            del events[4]
        case "released by an older incarnation":
            del events[13]
            del events[-1]
        case "released by an older generation":
            events[12] = Joined(RankProcess("job1", 1, "b1", 1, 3), "ckpt", 2, BOTH)
            events[13] = Arrived(RankProcess("job1", 1, "b1", 1, 3), "ckpt", 2, "1")
            del events[-1]
        case "heard before it arrived":
            events[4], events[5] = events[5], events[4]
        case "a gap":
            del events[9:11]
            events[9:9] = [arrived(A1, 2), heard(A1, 2)]
        case "not where it starts":
            events[12] = Joined(B1, "ckpt", 1, BOTH)
            events[13:13] = [arrived(B1, 3), heard(B1, 3, history.ABORTED)]
        case "released and yet missing":
            events[5:7] = [heard(A0, 0, missing=(1,)), heard(A1, 0, missing=(1,))]
        case "nobody is named":
            events[8] = heard(A0, 1, history.TIMED_OUT, "late")
            events[10] = heard(A1, 1, history.TIMED_OUT, "late")
        case "an outsider is named":
            events[8] = heard(A0, 1, history.TIMED_OUT, "late", (1, 2))
            events[10] = heard(A1, 1, history.TIMED_OUT, "late", (1, 2))
        case "a rank is named twice":
            events[8] = heard(A0, 1, history.TIMED_OUT, "late", (1, 1))
            events[10] = heard(A1, 1, history.TIMED_OUT, "late", (1, 1))
        case "another is named":
            events[8] = heard(A0, 1, history.TIMED_OUT, "late", (0,))
            events[10] = heard(A1, 1, history.TIMED_OUT, "late", (0,))
        case "nobody sent this":
            payloads = {0: "0", 1: "?"}
            events[5] = Heard(A0, "ckpt", 0, history.RELEASED, "well", (), payloads)
            events[6] = Heard(A1, "ckpt", 0, history.RELEASED, "well", (), payloads)
    return events


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("two outcomes", "one decision"),
        ("two messages", "one decision"),
        ("two lists of missing", "one decision"),
        ("two payloads", "one decision"),
        ("released without a rank", "everyone arrived"),
        ("released without having arrived", "own arrival"),
        ("released by an older incarnation", "everyone arrived"),
        ("released by an older generation", "everyone arrived"),
        ("heard before it arrived", "everyone arrived"),
        ("a gap", "in step"),
        ("not where it starts", "in step"),
        ("released and yet missing", "missing"),
        ("nobody is named", "missing"),
        ("an outsider is named", "missing"),
        ("a rank is named twice", "missing"),
        ("another is named", "missing"),
        ("nobody sent this", "payloads"),
    ],
)
def test_seeded_fault_is_found(name, rule):
    assert rule in broken_rules(seeded(name))


def test_failure_names_every_broken_rule():
    with pytest.raises(AssertionError, match=r'one decision: barrier "ckpt" #0 of run job1: rank 0 \(a0'):
        history.assert_good(seeded("two outcomes"))
