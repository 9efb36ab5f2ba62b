import json

import pytest
from rich.cells import cell_len

from muster.service.cli.views import columns
from muster.service.cli.views.table import Column, Table, document, fields, headed, json_line, name
from muster.service.formatting.cells import duration, ranks, size
from muster.service.wire import as_dict
from muster.v1 import common_pb2, run_pb2
from tests.unit.service.cli import samples


def lines(rows, shown, **options):
    return Table(shown, **options).text(rows).splitlines()


PAIR: list[Column[tuple[str, str]]] = [
    Column(title="NAME", cell=lambda row: row[0]),
    Column(title="STATE", cell=lambda row: row[1], state=True),
]


def test_columns_are_aligned_and_lines_have_no_trailing_spaces():
    assert lines([("a", "OPEN"), ("longer", "LOST")], PAIR) == [
        "NAME     STATE",
        "a        OPEN",
        "longer   LOST",
    ]


def test_characters_of_double_width_are_aligned_as_a_terminal_shows_them():
    shown = lines([("模型", "OPEN"), ("abcd", "LOST")], PAIR)
    assert cell_len(shown[1].removesuffix("OPEN")) == cell_len(shown[2].removesuffix("LOST")) == 7


def test_escapes_and_newlines_in_a_cell_are_made_visible():
    assert lines([("a\x1b[31m\nb", "OPEN")], PAIR)[1] == "a\\x1b[31m\\nb   OPEN"


def test_only_states_have_colours_and_only_when_asked():
    rows = [("LOST", "LOST")]
    assert "\x1b" not in Table(PAIR).text(rows)
    assert Table(PAIR, color=True).text(rows).splitlines()[1] == "LOST   \x1b[31mLOST\x1b[0m"


def test_a_later_batch_has_no_header_and_keeps_the_widths():
    table = Table(PAIR)
    assert table.text([("longer", "OPEN")]).splitlines()[0] == "NAME     STATE"
    assert table.text([("a", "LOST")]) == "a        LOST"
    assert table.text([("even longer", "LOST")]) == "even longer   LOST"


def test_the_last_column_is_cut_for_a_terminal_and_for_nothing_else():
    rows = [("a", "x" * 100)]
    assert lines(rows, PAIR, cut_at=40)[1] == "a      " + "x" * 32 + "…"
    assert lines(rows, PAIR)[1].endswith("x" * 100)
    # A name that fills the terminal leaves the last column its least room, and the terminal wraps.
    assert lines([("n" * 60, "x" * 100)], PAIR, cut_at=40)[1] == "n" * 60 + "   " + "x" * 11 + "…"


def test_runs():
    other = samples.run(
        "other-job", connected=0, members=0, round=3, nodes=2, nodes_waiting=1, closed=samples.closed()
    )
    assert lines([samples.run(), other], columns.RUNS) == [
        "RUN         STATE    GENERATION   ROUND   NODES   CONNECTED   OPEN   DECIDED   STEP",
        "job1        OPEN     0            -       -       15/16       1      7         -",
        "other-job   CLOSED   0            3       2       0/0         1      7         -",
    ]
    assert lines([samples.run()], columns.RUNS, wide=True)[0].split() == [
        "RUN", "STATE", "GENERATION", "ROUND", "NODES", "WAITING", "CONNECTED", "GROUPS", "OPEN", "DECIDED",
        "STEP", "LAST", "COMMIT",
    ]  # fmt: skip


def test_last_commit_of_a_run_is_its_age_or_nothing():
    shown = [samples.run(checkpoints=samples.checkpoints()), samples.run()]
    failed = samples.run(checkpoints=run_pb2.Checkpoints(failures=[run_pb2.FailedSave(reason="no")]))
    table = lines([*shown, failed], columns.RUNS, wide=True)
    assert [line.split()[-1] for line in table] == ["COMMIT", "4m12s", "-", "-"]


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (0, "0 bytes"),
        (1_023, "1023 bytes"),
        (1_024, "1.0 KiB"),
        (1_536, "1.5 KiB"),
        (2**20 - 1, "1,024.0 KiB"),
        (2**30, "1.0 GiB"),
        (3 * 2**59, "1,536.0 PiB"),
    ],
)
def test_sizes_are_told_in_the_largest_fitting_unit(count: int, shown: str):
    assert size(count) == shown


def test_the_steps_of_a_run_are_those_of_its_last_rank_and_its_first():
    run = samples.run()
    run.steps.lowest = run.steps.highest = 0
    assert columns.run_steps(run) == "0"
    run.steps.highest = 1200
    assert columns.run_steps(run) == "0-1200"


def test_barriers():
    rows = [samples.waiting(*map(samples.missing, (3, 4, 5, 9))), samples.decided(samples.missing(11))]
    assert lines(rows, columns.BARRIERS) == [
        "RUN    PREFIX       SEQUENCE   STATE       ARRIVED   WAITED   LEFT    MISSING",
        "job1   checkpoint   7          OPEN        12/16     41s      4m19s   3-5,9",
        "job1   checkpoint   6          TIMED_OUT   15/16     5m0s     -       11",
    ]


def test_wide_barriers_name_the_missing_in_the_words_of_the_coordinator():
    rows = [samples.decided(samples.missing(11, state=3, gone_ms=41_000)), samples.waiting()]
    shown = lines(rows, columns.BARRIERS, wide=True)
    assert "2026-09-21T14:13:20Z" in shown[1]
    assert shown[1].endswith("rank 11 (node-1, pid 4011, connection lost 41 s ago)")
    assert shown[2].split()[-5:] == ["-", "-", "-", "-", "-"]


def test_members():
    rows = [samples.member(0), samples.member(1, state=3, host="node-1", node_rank=0, step=1200)]
    assert lines(rows, columns.MEMBERS) == [
        "RANK   NODE   HOST     PID    STATE       SINCE   STEP   GROUPS",
        "0      -      node-0   4000   CONNECTED   65s     -      checkpoint#6,eval#-",
        "1      0      node-1   4001   LOST        65s     1200   checkpoint#6,eval#-",
    ]
    assert "life-1" in lines(rows, columns.MEMBERS, wide=True)[2]


def test_wide_members_show_through_which_relay_they_speak():
    rows = [samples.member(0, relay="node-0 (pid 70)"), samples.member(1)]
    head, through, own = lines(rows, columns.MEMBERS, wide=True)
    at = head.index("RELAY")
    assert through[at:].startswith("node-0 (pid 70)   ")
    assert own[at:].startswith("-   ")


def test_4096_members_are_shown_whole():
    shown = lines([samples.member(rank) for rank in range(4096)], columns.MEMBERS)
    assert [line.split()[0] for line in shown] == ["RANK", *map(str, range(4096))]


def test_lines_below_a_headline_are_indented_and_escaped():
    assert headed("done\x07: a\nb", ["to \x1b[2J"]) == "done\\x07: a\n    b\n  to \\x1b[2J"


def test_fields_are_aligned_and_escaped():
    assert fields({"Run": "a\x07", "Generation": "0"}) == "Run:         a\\x07\nGeneration:  0"


@pytest.mark.parametrize(
    ("milliseconds", "word"),
    [
        (0, "0ms"),
        (340, "340ms"),
        (2_500, "2.5s"),
        (9_999, "10s"),
        (41_000, "41s"),
        (119_499, "119s"),
        (320_000, "5m20s"),
        (7_200_000, "2h0m"),
        (26_000_000, "7h13m"),
        (273_600_000, "3d4h"),
    ],
)
def test_durations_are_one_word(milliseconds, word):
    assert duration(milliseconds) == word


def test_ranks_are_one_word():
    assert ranks([0, 1, 2, 7]) == "0-2,7"
    assert ranks([]) == "-"


def test_a_value_that_a_newer_coordinator_knows_is_shown_as_its_number():
    assert name(common_pb2.Outcome.DESCRIPTOR, common_pb2.OUTCOME_RELEASED, "OUTCOME_") == "RELEASED"
    assert name(common_pb2.Outcome.DESCRIPTOR, 77, "OUTCOME_") == "77"


def test_json_has_the_names_of_the_proto_and_its_zeros():
    response = run_pb2.RunServiceListResponse(runs=[run_pb2.Run(run_id="größe\x9b")])
    text = document(as_dict(response))
    assert json.loads(text) == {
        "runs": [
            {
                "run_id": "größe\x9b",
                "generation": "0",
                "connected": 0,
                "members": 0,
                "groups": 0,
                "open_barriers": 0,
                "decided_barriers": "0",
                "nodes": 0,
                "nodes_waiting": 0,
                "store_keys": "0",
                "store_bytes": "0",
                "forgotten": False,
            }
        ]
    }
    # A terminal obeys U+009B as it does an escape.
    assert text.isascii()


def test_json_has_enums_as_names_and_leaves_out_what_is_not_there():
    assert as_dict(samples.decided())["decision"]["outcome"] == "OUTCOME_TIMED_OUT"
    assert "decision" not in as_dict(samples.waiting())
    assert "\n" not in json_line(as_dict(samples.decided()))
