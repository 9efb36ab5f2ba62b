import io

import pytest
from rich.console import Console

from muster.service.cli.views.dashboard import Snapshot, render
from muster.v1 import common_pb2
from tests.unit.service.cli import samples


def snapshot(*barriers, **more):
    given = {"endpoint": "host:7550", "runs": [samples.run()], "taken_at": samples.DECIDED_AT + 12.0}
    return Snapshot(**{**given, "barriers": barriers, **more})


def lines(shown, *, width=100, height=24):
    console = Console(width=width, height=height, file=io.StringIO(), record=True)
    console.print(render(shown, height))
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_totals_open_barriers_and_last_decisions():
    released = samples.decided(
        outcome=common_pb2.OUTCOME_RELEASED, message="it was released\n  and more", at=samples.DECIDED_AT + 9
    )
    shown = snapshot(
        samples.decided(),
        samples.waiting(samples.missing(11, state=3, gone_ms=6_000)),
        samples.waiting(prefix="eval", age_ms=90_000, arrived=4, remaining_ms=1_000),
        released,
    )
    assert lines(shown, width=99) == [
        "muster at host:7550   runs 1   connected ranks 15   open barriers 1   q ends",
        "",
        "RUN    BARRIER         ARRIVED                  AGE    LEFT    MISSING",
        "job1   eval #7         ████░░░░░░░░░░░░ 4/16    90s    1s",
        "job1   checkpoint #7   ███████████████░ 15/16   41s    4m19s   rank 11 (node-1, pid 4011, connecti…",
        "",
        "AGO    OUTCOME     LAST DECISIONS",
        "3s     RELEASED    it was released",
        '12s    TIMED_OUT   barrier "checkpoint" #6 of run job1 timed out after 300 s',
    ]


def test_an_idle_coordinator():
    assert lines(snapshot(runs=[])) == [
        "muster at host:7550   runs 0   connected ranks 0   open barriers 0   q ends",
        "",
        "no barrier is open",
    ]


def test_nodes_and_closed_runs_are_counted_where_there_are_any():
    runs = [samples.run(nodes=2), samples.run("job2", nodes=1, closed=samples.closed())]
    first = (
        "muster at host:7550   runs 2 (1 closed)   nodes 3   connected ranks 30   open barriers 2   q ends"
    )
    assert lines(snapshot(runs=runs), width=100)[0] == first


def test_lost_contact_is_said_and_the_last_picture_stays():
    shown = lines(snapshot(samples.waiting(), error="it cannot be reached\n  next: look"))
    assert shown[1] == "it cannot be reached"
    assert any("checkpoint #7" in line for line in shown)


@pytest.mark.parametrize("error", [None, "lost"])
@pytest.mark.parametrize("height", [9, 12, 24, 50])
@pytest.mark.parametrize("waiting", [0, 3, 100])
@pytest.mark.parametrize("decided", [0, 3, 100])
def test_it_never_needs_more_lines_than_there_are(height, waiting, decided, error):
    barriers = [samples.waiting(sequence=n) for n in range(waiting)] + [samples.decided()] * decided
    shown = lines(snapshot(*barriers, error=error), height=height)
    assert len(shown) <= height
    if waiting:
        assert any("#0" in line for line in shown)
    if decided:
        assert any("timed out" in line for line in shown)


def test_barriers_that_do_not_fit_are_counted():
    barriers = [samples.waiting(sequence=n, age_ms=1000 - n) for n in range(100)]
    shown = lines(snapshot(*barriers), height=24)
    assert shown[-1] == f"and {100 - sum('#' in line for line in shown)} more"


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_names_are_text_and_not_markup_and_lines_are_cut(width):
    barrier = samples.waiting(*map(samples.missing, range(16)), run_id="[red]job[/]" * 5, prefix="x" * 200)
    shown = lines(snapshot(barrier, samples.decided(message="\x1b[2J [bold]odd[/]")), width=width)
    assert all(len(line) <= width for line in shown)
    assert "\x1b" not in "".join(shown)
    if width == 200:
        assert any("[red]job[/]" in line for line in shown)
        assert any("\\x1b[2J [bold]odd[/]" in line for line in shown)


def test_4096_missing_ranks_are_folded():
    absent = [samples.missing(rank, host=f"node-{rank // 8}") for rank in range(4096)]
    shown = lines(snapshot(samples.waiting(*absent, required=4096, arrived=0)))
    assert any("ranks 0-7 (node-0, connected" in line for line in shown)


def test_barrier_with_unknown_shape_has_an_empty_bar():
    assert any("░" * 16 + " 0/0" in line for line in lines(snapshot(samples.waiting(arrived=0, required=0))))


def test_the_groups_of_a_save_are_told_apart_however_long_their_prefix_is():
    prefix = "llama-70b-pretraining/save"
    shown = lines(
        snapshot(*(samples.waiting(prefix=f"{prefix}{end}") for end in ("", "/commit", "/agreement")))
    )
    names = [line.split()[1:3] for line in shown if line.startswith("job1")]
    assert [" ".join(name) for name in names] == [
        "llama-70…raining/save #7",
        "llama-70…/save/commit #7",
        "llama-70…ve/agreement #7",
    ]
