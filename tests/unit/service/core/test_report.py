import pytest

from muster.service.core import report
from muster.service.core.model import Failure, MissingRank, MissingState, Outcome

NOT_ARRIVED = MissingRank(3, MissingState.NOT_ARRIVED, "node-0", 4121, last_sequence=6)
CONNECTION_LOST = MissingRank(11, MissingState.CONNECTION_LOST, "node-1", 77, gone_for=41.2)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("größe ✓", "größe ✓"),
        ("red \x1b[31m", "red \\x1b[31m"),
        ("a\x00b\rc", "a\\x00b\\rc"),
        ("two\nlines", "two\nlines"),
    ],
)
def test_control_characters_are_made_visible(text, shown):
    assert report.printable(text) == shown


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0 ms"), (0.0123, "12 ms"), (2.5, "2.5 s"), (41.2, "41 s"), (300, "300 s")],
)
def test_durations_are_short(value, text):
    assert report.seconds(value) == text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([4], "4"), ([2, 0, 1, 5], "0-2, 5"), ([0, 2, 4], "0, 2, 4"), (range(4096), "0-4095")],
)
def test_ranks_are_folded_into_ranges(ranks, text):
    assert report.ranges(ranks) == text


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        (MissingRank(7, MissingState.NEVER_JOINED), "rank 7 (never joined)"),
        (NOT_ARRIVED, "rank 3 (node-0, pid 4121, connected, still at #6)"),
        (
            MissingRank(3, MissingState.NOT_ARRIVED, "node-0", 4121),
            "rank 3 (node-0, pid 4121, connected, not arrived yet)",
        ),
        (CONNECTION_LOST, "rank 11 (node-1, pid 77, connection lost 41 s ago)"),
        (
            MissingRank(2, MissingState.LEFT, "node-1", 78, gone_for=1.5),
            "rank 2 (node-1, pid 78, left 1.5 s ago)",
        ),
    ],
)
def test_a_missing_rank_is_named_with_host_pid_and_why(missing, text):
    assert report.missing_one(missing) == text


def test_few_missing_ranks_are_named_one_by_one():
    named = report.missing_all([MissingRank(r, MissingState.NEVER_JOINED) for r in range(16)])
    assert named.count("rank ") == 16


def test_many_missing_ranks_are_folded_by_host_and_reason_and_none_is_left_out():
    missing = [MissingRank(r, MissingState.NOT_ARRIVED, f"node-{r // 8}", 100 + r) for r in range(16)]
    missing += [MissingRank(r, MissingState.NEVER_JOINED) for r in range(16, 4096) if r != 99]
    assert report.missing_all(missing) == (
        "ranks 0-7 (node-0, connected, not arrived yet); ranks 8-15 (node-1, connected, not arrived yet); "
        "ranks 16-98, 100-4095 (never joined)"
    )


def test_the_roll_call_counts_and_names():
    assert report.roll_call(16, 16, ()) == "arrived 16 of 16"
    assert report.roll_call(15, 16, [NOT_ARRIVED]).startswith("arrived 15 of 16; missing: rank 3 (")


def test_votes_are_named_with_rank_and_reason():
    text = report.voted([Failure(3, "node-0", 4121, "No space left"), Failure(4, "node-0", 4122, "bad CRC")])
    assert text == (
        "was aborted: rank 3 (node-0, pid 4121) failed: No space left; "
        "rank 4 (node-0, pid 4122) failed: bad CRC"
    )


def test_a_decision_reads_as_the_design_shows_it():
    text = report.decision(
        report.barrier_name("job1", "checkpoint", 7),
        report.timed_out(300.0),
        Outcome.TIMED_OUT,
        "job1",
        14,
        16,
        [NOT_ARRIVED, CONNECTION_LOST],
        3,
    )
    assert text == (
        'barrier "checkpoint" #7 of run job1 timed out after 300 s\n'
        "  arrived 14 of 16; missing: rank 3 (node-0, pid 4121, connected, still at #6), "
        "rank 11 (node-1, pid 77, connection lost 41 s ago)\n"
        "  next: muster describe member job1 3"
    )


def test_a_release_is_one_line():
    why = report.released(16, 0.25, 3)
    text = report.decision("barrier X", why, Outcome.RELEASED, "job1", 16, 16, (), None)
    assert text == "barrier X was released: 16 of 16 arrived in 250 ms, rank 3 last"


def test_a_reason_of_several_lines_is_indented_and_cannot_steer_a_terminal():
    why = report.aborted("Traceback:\n  boom \x1b[2J")
    text = report.decision("barrier X", why, Outcome.ABORTED, "job1", 1, 2, (), None)
    assert text.splitlines()[:2] == ["barrier X was aborted: Traceback:", "      boom \\x1b[2J"]
