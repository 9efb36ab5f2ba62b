"""Reports of a keeper, and the changes between two of them."""

from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.committed import SaveAttempt
from muster.client.protocol import MAX_HOLDINGS
from muster.keeper.reporting import LONG, Report
from muster.keeper.vocabulary import Attachment, Holding, Transfer

attempts = st.builds(SaveAttempt, st.integers(1, 2), st.integers(0, 1))
ranks = st.frozensets(st.integers(0, 2))

transfers = st.builds(Transfer, st.integers(1, 2), st.sampled_from([1.0, 2 * LONG]))


def holdings_of(attempt: SaveAttempt) -> st.SearchStrategy[Holding]:
    digests, places = st.sampled_from([b"a", b"b"]), st.sampled_from(["", "s3://bucket/step-1"])
    return st.builds(Holding, st.just(attempt), digests, ranks, ranks, places)


@st.composite
def reports(draw: st.DrawFn) -> Report:
    drawn = {
        "attachment": draw(st.none() | st.builds(Attachment, st.integers(1, 2), st.just(3), ranks)),
        "holdings": {one: draw(holdings_of(one)) for one in draw(st.frozensets(attempts))},
        "used": draw(st.integers(0, 5)),
        "quota": draw(st.integers(1, 2)),
        "confirmed": draw(st.integers(0, 2)),
        "transfers": draw(st.dictionaries(st.sampled_from("ab"), transfers)),
    }
    assert {field.name for field in fields(Report)} - drawn.keys() == {"goes_on"}, "only changes have it"
    return Report(**drawn)  # type: ignore[arg-type]


@given(reports())
def test_report_of_changes_is_empty_when_nothing_has_changed(report: Report):
    assert report.without(report).is_empty


@given(reports(), reports())
def test_changes_applied_to_the_last_report_give_the_new_one(before: Report, now: Report):
    after = before.with_changes(now.without(before))
    assert replace(after, holdings={}) == replace(
        now,
        holdings={},
        attachment=now.attachment or before.attachment,
        transfers=now.transfers or before.transfers,
    )
    for attempt, said in after.holdings.items():
        here = now.holdings.get(attempt)
        if here is not None:
            assert said == here
        else:
            assert not said.ranks
            assert not said.persisted_ranks
    assert after.holdings.keys() >= now.holdings.keys()
    assert now.without(after).is_empty, "nothing is left to report"


def _many(count: int, digest: bytes, confirmed: int = 0) -> Report:
    attempts = (SaveAttempt(1, number) for number in range(count))
    holdings = {one: Holding(one, digest, frozenset({0})) for one in attempts}
    return Report(holdings=holdings, confirmed=confirmed)


def test_report_of_changes_names_no_more_checkpoints_than_the_coordinator_takes():
    heard, now = _many(2 * MAX_HOLDINGS, b"a", 1), _many(MAX_HOLDINGS, b"b", 2)
    reports = []
    while not (changes := now.without(heard)).is_empty:
        reports.append((len(changes.holdings), changes.confirmed))
        heard = heard.with_changes(changes)
    assert reports == [(MAX_HOLDINGS, 0), (MAX_HOLDINGS, 2)], "only the last one confirms all of them"
    assert {attempt: one for attempt, one in heard.holdings.items() if one.ranks} == now.holdings


def test_transfers_go_with_the_next_report():
    before = Report(used=1, quota=2, transfers={"a": Transfer(5, 1.0)})
    now = Report(used=1, quota=2, transfers={"a": Transfer(50, 2.0), "b": Transfer(7, 1.0)})
    changes = now.without(before)
    assert changes.is_empty
    assert changes.transfers == now.transfers
    assert before.with_changes(changes).transfers == now.transfers
    assert before.without(before).transfers == {}
    assert before.with_changes(before.without(before)).transfers == before.transfers


def test_transfer_that_goes_on_for_long_is_reported_before_its_end():
    before = Report(transfers={"a": Transfer(5, 1.0)})
    now = Report(transfers={"a": Transfer(500, 1.0 + LONG)})
    assert not now.without(before).is_empty
    assert not Report(transfers={"b": Transfer(5, LONG)}).without(before).is_empty
    assert now.without(before.with_changes(now.without(before))).is_empty
