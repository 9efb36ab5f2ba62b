from muster.service.cli.views.columns import ROUNDS
from muster.service.cli.views.get import changes, rendezvous_content
from muster.service.cli.views.table import Table
from muster.service.formatting.rounds import round_key, rounds_of
from muster.v1 import rendezvous_pb2
from tests.unit.service.cli import samples


def lines(rendezvous, **options):
    return Table(ROUNDS, **options).text(rounds_of(rendezvous)).splitlines()


def test_round_that_forms_counts_against_the_most_nodes():
    shown = samples.rendezvous(
        samples.place(0), samples.place(1), round=1, rounds=[samples.completed_round(0)]
    )
    assert lines(shown) == [
        "ROUND   STATE     NODES   WAITING   JOINED IN   COMPLETED AT",
        "1       FORMING   2/4     0         -           -",
        "0       OVER      2       -         2.5s        2026-09-21T14:13:20Z",
    ]


def test_complete_round_counts_its_nodes_and_waiting_ones():
    shown = samples.rendezvous(
        samples.place(0, rank=0),
        samples.place(2, rendezvous_pb2.NODE_STANDING_WAITING),
        samples.place(3, rendezvous_pb2.NODE_STANDING_REDUNDANT),
        complete=True,
        rounds=[samples.completed_round(0)],
    )
    assert lines(shown)[1] == "0       COMPLETE   1/2     1         2.5s        2026-09-21T14:13:20Z"
    assert lines(shown, wide=True)[1].split()[4:] == [
        "1", "2.5s", "2026-09-21T14:13:20Z", "node-0", "(pid", "900)", "-",
    ]  # fmt: skip


def test_copies_are_shown_with_the_complete_round_only():
    complete = samples.rendezvous(
        samples.place(0, rank=0), round=1, complete=True, rounds=[samples.completed_round(n) for n in (1, 0)]
    )
    assert [row.copies for row in rounds_of(complete, "a to b; b to a")] == ["a to b; b to a", "-"]
    forming = samples.rendezvous(samples.place(0), round=1, rounds=[samples.completed_round(0)])
    assert [row.copies for row in rounds_of(forming, "a to b; b to a")] == ["-", "-"]


def test_current_round_of_a_closed_run_is_closed():
    shown = samples.rendezvous(round=1, rounds=[samples.completed_round(0)], closed=samples.closed())
    assert [(row.round, row.state, row.nodes) for row in rounds_of(shown)] == [
        (1, "CLOSED", "0/4"),
        (0, "OVER", "2"),
    ]


def test_rounds_are_empty_before_the_first_node():
    assert rounds_of(samples.rendezvous(min_nodes=0, max_nodes=0)) == []
    restarted = samples.rendezvous(min_nodes=0, max_nodes=0, round=1, rounds=[samples.completed_round(0)])
    assert [row.state for row in rounds_of(restarted)] == ["OVER"]


def test_names_cannot_speak_to_the_terminal():
    shown = samples.rendezvous(samples.place(0, address="\x1b[2J"))
    assert lines(shown, wide=True)[1].endswith("\\x1b[2J (pid 900)   -")


def test_watch_shows_the_rounds_that_are_new_or_stand_otherwise():
    forming = samples.rendezvous(samples.place(0))
    later = samples.rendezvous(samples.place(0, since_ms=99_000))
    complete = samples.rendezvous(
        samples.place(0, rank=0), complete=True, rounds=[samples.completed_round(0, nodes=1)]
    )
    looks = [forming, later, complete]
    fresh = list(changes(map(rounds_of, looks), round_key, lambda row: row))
    assert [[row.state for row in batch] for batch in fresh] == [["FORMING"], [], ["COMPLETE"]]
    assert list(changes([[one] for one in looks], lambda one: one.run_id, rendezvous_content)) == [
        [forming], [], [complete],
    ]  # fmt: skip
