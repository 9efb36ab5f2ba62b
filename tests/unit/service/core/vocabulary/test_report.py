import shlex

import pytest

from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.model import (
    Closed,
    Failure,
    MissingRank,
    MissingState,
    NodeInfo,
    Outcome,
    RendezvousSettings,
)

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
def test_missing_rank_is_named_with_host_pid_and_why(missing, text):
    assert report.missing_one(missing) == text


def test_few_missing_ranks_are_named_one_by_one():
    named = report.missing_all([MissingRank(r, MissingState.NEVER_JOINED) for r in range(16)])
    assert named.count("rank ") == 16


def test_many_missing_ranks_are_all_named_by_host_and_reason():
    missing = [MissingRank(r, MissingState.NOT_ARRIVED, f"node-{r // 8}", 100 + r) for r in range(16)]
    missing += [MissingRank(r, MissingState.NEVER_JOINED) for r in range(16, 4096) if r != 99]
    assert report.missing_all(missing) == (
        "ranks 0-7 (node-0, connected, not arrived yet); ranks 8-15 (node-1, connected, not arrived yet); "
        "ranks 16-98, 100-4095 (never joined)"
    )


def test_roll_call_counts_and_names():
    assert report.roll_call(16, 16, ()) == "arrived 16 of 16"
    assert report.roll_call(15, 16, [NOT_ARRIVED]).startswith("arrived 15 of 16; missing: rank 3 (")


def test_votes_are_named_with_rank_and_reason():
    text = report.voted([Failure(3, "node-0", 4121, "No space left"), Failure(4, "node-0", 4122, "bad CRC")])
    assert text == (
        "was aborted: rank 3 (node-0, pid 4121) failed: No space left; "
        "rank 4 (node-0, pid 4122) failed: bad CRC"
    )


def test_decision_reads_as_the_design_shows_it():
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
        'barrier "checkpoint" #7 of run job1 timed out after 300 s (the first arrival\'s timeout)\n'
        "  arrived 14 of 16; missing: rank 3 (node-0, pid 4121, connected, still at #6), "
        "rank 11 (node-1, pid 77, connection lost 41 s ago)\n"
        "  next: muster describe member job1 3"
    )


def test_release_is_one_line():
    why = report.released(16, 0.25, 3)
    text = report.decision("barrier X", why, Outcome.RELEASED, "job1", 16, 16, (), None)
    assert text == "barrier X was released: 16 of 16 arrived in 250 ms, rank 3 last"


def test_reason_of_several_lines_is_indented_and_cannot_steer_a_terminal():
    why = report.aborted("Traceback:\n  boom \x1b[2J")
    text = report.decision("barrier X", why, Outcome.ABORTED, "job1", 1, 2, (), None)
    assert text.splitlines()[:2] == ["barrier X was aborted: Traceback:", "      boom \\x1b[2J"]


# ---------------------------------------------------------------------- rendezvous

A, B = NodeInfo("a1", "node-0", 100), NodeInfo("b1", "node-1", 101)


def asking(fewest, most):
    return RendezvousSettings(
        min_nodes=fewest, max_nodes=most, join_timeout=600, last_call_timeout=30, keep_alive_timeout=15
    )


def test_evicted_rank_is_named_with_since_when():
    one = MissingRank(3, MissingState.EVICTED, "node-0", 4121, gone_for=3)
    assert report.missing_one(one) == "rank 3 (node-0, pid 4121, evicted 3 s ago)"


def test_nodes_are_named_while_they_are_few():
    many = [NodeInfo(f"i{n}", f"node-{n}", n) for n in range(20)]
    assert report.node_names([A, B]) == "node-0 (pid 100), node-1 (pid 101)"
    assert report.node_names(many).endswith("node-15 (pid 15) and 4 more")
    assert report.node_names(many[:16]).endswith("node-15 (pid 15)")


@pytest.mark.parametrize(
    ("fewest", "most", "text"), [(1, 1, "1 node"), (4, 4, "4 nodes"), (1, 4, "1 to 4 nodes")]
)
def test_requested_number_of_nodes_is_formatted_briefly(fewest, most, text):
    assert report.nodes_wanted(asking(fewest, most)) == text


@pytest.mark.parametrize(
    ("count", "waiting", "redundant", "text"),
    [
        (1, 0, 0, "with 1 node in it"),
        (2, 1, 0, "with 2 nodes in it, 1 waiting to be let in"),
        (2, 0, 3, "with 2 nodes in it, 3 standing by"),
        (2, 1, 3, "with 2 nodes in it, 1 waiting to be let in, 3 standing by"),
    ],
)
def test_complete_round_names_its_waiting_and_standby_nodes(count, waiting, redundant, text):
    said = report.round_runs("job1", 7, count, waiting, redundant)
    assert said == f"round 7 of run job1 is complete, {text}"


def test_round_that_comes_together_says_how_far_it_is():
    said = report.round_forms("job1", 7, 1, asking(2, 4))
    assert said == "round 7 of run job1 comes together: 1 of 2 to 4 nodes have joined"


def test_completed_round_names_its_nodes():
    said = report.round_completed("job1", 7, [A, B], 2.5)
    assert said == "round 7 of run job1 was completed in 2.5 s: node-0 (pid 100), node-1 (pid 101)"


def test_timed_out_rendezvous_names_the_nodes_that_joined():
    said = report.rendezvous_timed_out("job1", 7, 600, [A], asking(2, 2), running=None)
    assert said == (
        "round 7 of run job1 did not come together within the join timeout of 600 s: "
        "1 of 2 nodes had joined: node-0 (pid 100)"
    )
    said = report.rendezvous_timed_out("job1", 7, 600, [A], asking(2, 2), running=2)
    assert said == (
        "the 2 nodes of round 7 of run job1 let nobody in within the join timeout of 600 s; "
        "waiting: node-0 (pid 100)"
    )


def test_departed_nodes_are_named():
    assert report.nodes_gone([]) == ""
    gone = [(A, 6, "connection lost", 41.2), (B, 7, "left (bye)", 0.5)]
    assert report.nodes_gone(gone) == (
        "\n  gone: node-0 (pid 100) of round 6, connection lost 41 s ago; "
        "node-1 (pid 101) of round 7, left (bye) 500 ms ago"
    )


@pytest.mark.parametrize(
    ("by", "reason", "text"),
    [
        ("me", "", "run job1 was closed by me"),
        ("me", "done", "run job1 was closed by me: done"),
        ("\x1b[31m", "\x00", "run job1 was closed by \\x1b[31m: \\x00"),
        ("me", "x" * 100, f"run job1 was closed by me: {'x' * 80}…"),
    ],
)
def test_closed_run_names_the_closer_and_the_reason(by, reason, text):
    assert report.run_closed("job1", Closed(by, reason, 0.0)) == text


def test_missing_are_folded_by_host_and_reason():
    lost = [
        MissingRank(rank, MissingState.CONNECTION_LOST, "node-1", 70 + rank, gone_for=41) for rank in (9, 10)
    ]
    never = MissingRank(12, MissingState.NEVER_JOINED)
    one, two, three = report.by_host([NOT_ARRIVED, lost[0], never, lost[1]])
    assert (one.host, one.why, one.ranks) == ("node-0", "connected, still at #6", [3])
    assert (two.host, two.why, two.ranks, two.pids) == (
        "node-1",
        "connection lost 41 s ago",
        [9, 10],
        [79, 80],
    )
    assert (three.host, three.state, three.ranks) == ("", MissingState.NEVER_JOINED, [12])
    assert set(report.MISSING_WORDS) == set(MissingState)


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("job1", 3), "muster describe member job1 3"),
        (("team/a:1.2_3-4", 3), "muster describe member team/a:1.2_3-4 3"),
        (("my job", 3), "muster describe member 'my job' 3"),
        (("x; rm -rf / #", 3), "muster describe member 'x; rm -rf / #' 3"),
        (("$(id)`id`", 3), "muster describe member '$(id)`id`' 3"),
        (("it's", 3), """muster describe member 'it'"'"'s' 3"""),
        (("-e", 3), "muster describe member -- -e 3"),
    ],
)
def test_command_to_paste_quotes_the_names_that_others_chose(names: tuple[object, ...], line: str):
    made = report.command("describe member", *names)
    assert made == line
    assert [word for word in shlex.split(made)[3:] if word != "--"] == [str(name) for name in names]
