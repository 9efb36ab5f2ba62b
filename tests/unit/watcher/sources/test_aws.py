"""Amazon EC2: which documents are notices, and how the reader gets them."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.watching.metadata import FakeAws, answers, hangs, huge, iso, truncated
from muster.watcher.notice import Notice
from muster.watcher.polling import LookError
from muster.watcher.sources import aws
from muster.watcher.sources.aws import (
    TOKEN_MARGIN,
    TOKEN_SECONDS,
    Aws,
    rebalance,
    scheduled,
    spot_interruption,
)
from tests.unit.watcher.sources.failing import why

NOW = 1_780_000_000.0
EVENT = {
    "NotBefore": "28 May 2026 20:30:00 GMT",
    "NotAfter": "28 May 2026 21:30:00 GMT",
    "Code": "system-reboot",
    "Description": "scheduled reboot",
    "EventId": "instance-event-0d59",
    "State": "active",
}
BEGINS = NOW + 200


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_spot_interruption_stops_with_its_time_as_deadline(action: str):
    (notice,) = spot_interruption({"action": action, "time": iso(NOW + 120)}, "n1", NOW)
    assert notice == Notice(
        id=f"aws/spot/n1/{action}/2026-05-28T20:28:40Z",
        reason=f"AWS interrupts the Spot instance n1: {action}",
        stop=True,
        deadline=NOW + 120,
    )


def test_hibernation_need_not_say_when():
    (notice,) = spot_interruption({"action": "hibernate"}, "n1", NOW)
    assert (notice.id, notice.deadline) == ("aws/spot/n1/hibernate", None)


def test_rebalance_recommendation_saves_without_a_stop():
    (notice,) = rebalance({"noticeTime": iso(NOW)}, "n1", NOW)
    assert (notice.id, notice.stop, notice.deadline) == ("aws/rebalance/n1/2026-05-28T20:26:40Z", False, None)


def test_scheduled_event_stops_before_it_may_begin():
    (notice,) = scheduled([EVENT], "n1", NOW)
    assert notice == Notice(
        id="aws/scheduled/n1/instance-event-0d59/2026-05-28T20:30:00Z",
        reason="AWS schedules system-reboot of n1: scheduled reboot",
        stop=True,
        deadline=BEGINS,
    )


@pytest.mark.parametrize(
    ("fields", "now", "there"),
    [
        pytest.param({}, BEGINS - 901, False, id="far away"),
        pytest.param({}, BEGINS - 899, True, id="near"),
        pytest.param({}, BEGINS + 60, True, id="in its window"),
        pytest.param({}, BEGINS + 3601, False, id="after its window"),
        pytest.param({"NotAfter": ""}, BEGINS + 3601, True, id="empty end"),
        pytest.param({"NotAfter": None}, BEGINS, True, id="null end"),
        pytest.param({"State": "completed"}, BEGINS, False, id="completed"),
        pytest.param({"State": "canceled", "NotBefore": "nonsense"}, BEGINS, False, id="canceled"),
        pytest.param({"Description": None}, BEGINS, True, id="no description"),
    ],
)
def test_scheduled_event_is_a_notice_when_it_is_active_and_near(
    fields: dict[str, Any], now: float, there: bool
):
    assert bool(scheduled([EVENT | fields], "n1", now)) is there


def test_event_that_is_moved_is_another_notice():
    moved = EVENT | {"NotBefore": "28 May 2026 20:31:00 GMT"}
    (before,), (after,) = scheduled([EVENT], "n1", NOW), scheduled([moved], "n1", NOW)
    assert before.id != after.id


def test_lead_is_given():
    assert scheduled([EVENT], "n1", NOW, lead=100) == []
    assert scheduled([EVENT], "n1", NOW - 3600, lead=4000) != []


@pytest.mark.parametrize(
    "found",
    [
        None,
        "terminate",
        [],
        {},
        {"action": 1, "time": iso(NOW)},
        {"action": "term inate", "time": iso(NOW)},
        {"action": "terminate", "time": "soon"},
        {"action": "terminate", "time": 1},
        {"action": "terminate", "time": "1970-01-01T00:00:00Z"},
    ],
)
def test_other_interruption_is_refused(found: object):
    with pytest.raises(LookError):
        spot_interruption(found, "n1", NOW)


@pytest.mark.parametrize("found", [None, [], {}, {"noticeTime": None}, {"noticeTime": "x"}])
def test_other_recommendation_is_refused(found: object):
    with pytest.raises(LookError):
        rebalance(found, "n1", NOW)


@pytest.mark.parametrize(
    "fields",
    [
        {"NotBefore": None},
        {"NotBefore": "tomorrow"},
        {"NotAfter": "tomorrow"},
        {"NotAfter": 5},
        {"Code": "a b"},
        {"EventId": ""},
        {"State": None},
    ],
)
def test_other_event_is_refused(fields: dict[str, Any]):
    with pytest.raises(LookError):
        scheduled([EVENT | fields], "n1", NOW)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*EVENT, "action", "time"]), inner)
    ),
    max_leaves=12,
)


@given(JSON)
def test_garbage_is_refused_or_a_wellformed_notice(found: object):
    for parse in (spot_interruption, rebalance, scheduled):
        try:
            notices = parse(found, "n1", NOW)
        except LookError:
            continue
        assert all(notice.id.isprintable() and notice.reason.isprintable() for notice in notices)


@pytest.fixture
def server() -> Iterator[FakeAws]:
    with FakeAws() as running:
        yield running


@pytest.fixture
def source(server: FakeAws) -> Aws:
    return Aws("n1", base=server.base)


async def kinds(source: Aws) -> list[str]:
    return [notice.id.split("/")[1] for notice in await source.look()]


async def test_notices_come_go_and_keep_their_ids(server: FakeAws, source: Aws):
    assert await kinds(source) == []
    server.interrupt()
    server.recommend_rebalance()
    server.schedule()
    server.schedule(seconds=86_400)
    found = await source.look()
    assert [notice.id.split("/")[1] for notice in found] == ["spot", "rebalance", "scheduled"]
    assert await source.look() == found
    # A restarted watcher says the same.
    assert await Aws("n1", base=server.base).look() == found
    server.documents.clear()
    assert await source.look() == []


async def test_one_token_is_used_until_shortly_before_its_end(server: FakeAws):
    now = 1_000.0
    source = Aws("n1", base=server.base, monotonic=lambda: now)
    await source.look()
    now += TOKEN_SECONDS - TOKEN_MARGIN - 1
    await source.look()
    assert server.asked.count(f"PUT {server.TOKEN}") == 1
    now += 2
    await source.look()
    assert server.asked.count(f"PUT {server.TOKEN}") == 2


async def test_token_that_the_server_forgot_is_replaced(server: FakeAws, source: Aws):
    server.interrupt()
    await source.look()
    server.tokens.clear()
    assert await kinds(source) == ["spot"]
    assert server.asked.count(f"PUT {server.TOKEN}") == 2


async def test_server_that_takes_no_token_is_not_asked_forever(server: FakeAws, source: Aws):
    for path in (server.SPOT, server.REBALANCE, server.SCHEDULED):
        server.faults[path] = answers(401)
    assert "spot/instance-action answers 401." in await why(source.look)
    assert len(server.asked) < 13


async def test_broken_document_hides_no_interruption(server: FakeAws, source: Aws):
    await source.look()
    server.faults[server.SCHEDULED] = answers(500)
    assert "events/maintenance/scheduled answers 500." in await why(source.look)
    server.interrupt()
    assert await kinds(source) == ["spot"]
    assert "answers 500." in await why(source.look)
    del server.faults[server.SCHEDULED]
    assert await kinds(source) == ["spot"]


@pytest.mark.parametrize(
    ("status", "advice"), [(404, "Is this an EC2 instance?"), (403, "Is its metadata enabled?")]
)
async def test_refused_token_says_what_to_look_at(server: FakeAws, source: Aws, status: int, advice: str):
    server.faults[server.TOKEN] = answers(status)
    message = await why(source.look)
    assert message == f"{server.base}{server.TOKEN} answers {status}. {advice}"


async def test_token_that_does_not_come_says_what_a_container_needs(
    server: FakeAws, source: Aws, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("muster.watcher.sources.metadata.TIMEOUT", 0.2)
    server.faults[server.TOKEN] = hangs
    assert (await why(source.look)).endswith("the instance's hop limit must be 2 or more.")


@pytest.mark.parametrize("token", ["", "a\r\nX-Header: b", "x" * 1_025, "<html>"])
async def test_token_that_is_none_is_refused(server: FakeAws, source: Aws, token: str):
    server.faults[server.TOKEN] = answers(200, token)
    assert "gives no token" in await why(source.look)
    assert not any(one.startswith("GET") for one in server.asked)


@pytest.mark.parametrize(
    "fault",
    [
        answers(500),
        answers(301, Location="http://127.0.0.1:1/"),
        answers(200, "<html>"),
        answers(200, json.dumps({"action": "terminate", "time": "soon"})),
        answers(200),
        huge,
        truncated,
    ],
)
async def test_broken_server_gives_no_notice(server: FakeAws, source: Aws, fault):
    server.faults[server.SPOT] = fault
    assert "spot/instance-action" in await why(source.look)


def test_address_is_aws_and_polls_as_aws_recommends():
    assert (aws.BASE, aws.INTERVAL) == ("http://169.254.169.254", 5.0)
