import getpass

import pytest

from muster.service.cli.actions.close import closing_text
from muster.service.cli.client.caller import caller
from muster.v1 import common_pb2, rendezvous_pb2
from tests.support.expect import raising
from tests.unit.service.cli import samples

OPEN = [common_pb2.BarrierName(prefix="checkpoint", sequence=7)]


def request(**more):
    return rendezvous_pb2.CloseRequest(run_id="job1", by="ann@desk", **more)


def response(**more):
    return rendezvous_pb2.CloseResponse(**more)


def test_dry_run_lists_affected_nodes_processes_and_barriers():
    affected = response(
        waiting_nodes=[samples.node(1), samples.node(2)],
        nodes_in_round=4,
        connected_processes=1,
        open_barriers=OPEN,
    )
    assert closing_text(request(dry_run=True), affected) == (
        "would close run job1\n"
        "  the wait of 2 nodes ends: node-1 (pid 901), node-2 (pid 902)\n"
        "  4 nodes in the round are told, and go on\n"
        "  1 connected process is told, and goes on\n"
        '  barrier "checkpoint" #7 of run job1 goes on'
    )
    text = closing_text(request(dry_run=True, abort_barriers=True), affected)
    assert text.endswith('barrier "checkpoint" #7 of run job1 is aborted')


def test_completed_close_is_described_in_the_past_tense():
    done = response(
        closed=samples.closed(),
        waiting_nodes=[samples.node(1)],
        nodes_in_round=1,
        connected_processes=8,
        open_barriers=OPEN,
    )
    assert closing_text(request(abort_barriers=True), done) == (
        "run job1 was closed by ann@desk: the budget is spent\n"
        "  the wait of 1 node ended: node-1 (pid 901)\n"
        "  1 node in the round was told, and goes on\n"
        "  8 connected processes were told, and go on\n"
        '  barrier "checkpoint" #7 of run job1 was aborted'
    )


def test_closing_what_nobody_is_in():
    assert closing_text(request(), response(closed=samples.closed(reason=""))) == (
        "run job1 was closed by ann@desk\n  nobody is there to be told"
    )


def test_a_second_closing_only_ends_barriers():
    done = response(
        closed=samples.closed(),
        was_closed=True,
        nodes_in_round=2,
        connected_processes=4,
        open_barriers=OPEN,
    )
    assert closing_text(request(abort_barriers=True), done) == (
        "run job1 was closed by ann@desk: the budget is spent\n"
        '  barrier "checkpoint" #7 of run job1 was aborted'
    )
    assert closing_text(request(abort_barriers=True, dry_run=True), done) == (
        "would only end barriers: run job1 was closed by ann@desk: the budget is spent\n"
        '  barrier "checkpoint" #7 of run job1 is aborted'
    )


def test_names_and_reasons_cannot_speak_to_the_terminal():
    done = response(
        closed=samples.closed(by="\x1b[2J", reason="one\ntwo\x07"),
        waiting_nodes=[samples.node(1, address="\x1b]0;")],
    )
    text = closing_text(request(), done)
    assert text.isprintable() or set(filter(lambda c: not c.isprintable(), text)) == {"\n"}
    assert "\n    two\\x07\n  the wait of 1 node ended: \\x1b]0; (pid 901)" in text


@pytest.mark.parametrize("user", ["ann", "ü" * 300, "\x1b[2J", "\udcff"])
def test_the_caller_is_a_name_that_the_coordinator_takes(monkeypatch, user):
    monkeypatch.setattr(getpass, "getuser", lambda: user)
    name = caller()
    assert name.isprintable()
    assert 0 < len(name.encode()) <= 256


def test_a_user_without_a_name_is_a_number(monkeypatch):
    monkeypatch.setattr(getpass, "getuser", raising(KeyError, "getpwuid(): uid not found: 1234"))
    monkeypatch.setattr("os.getuid", lambda: 1234)
    assert caller().startswith("uid 1234@")
