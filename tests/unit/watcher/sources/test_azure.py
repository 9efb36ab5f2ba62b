"""Azure: which Scheduled Events are notices, and how the reader gets them."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.watching.metadata import FakeAzure, answers, hangs, huge, truncated
from muster.watcher.notice import Notice
from muster.watcher.polling import LookError
from muster.watcher.sources.azure import Azure, scheduled_events
from tests.unit.watcher.sources.failing import why

NOW = 1_780_000_000.0
EVENT: dict[str, Any] = {
    "EventId": "602d9444-d2cd",
    "EventType": "Preempt",
    "ResourceType": "VirtualMachine",
    "Resources": ["vmss_0", "vmss_1"],
    "EventStatus": "Scheduled",
    "NotBefore": "Thu, 28 May 2026 20:30:00 GMT",
    "Description": "Virtual machine is to be evicted",
    "EventSource": "Platform",
    "DurationInSeconds": -1,
}
BEGINS = NOW + 200


def parse(*events: object, vm: str = "vmss_0", now: float = NOW) -> list[Notice]:
    return scheduled_events({"DocumentIncarnation": 1, "Events": list(events)}, vm, "n1", now)


def test_eviction_stops_with_its_time_as_deadline():
    assert parse(EVENT) == [
        Notice(
            id="azure/preempt/n1/602d9444-d2cd",
            reason="Azure evicts the Spot VM n1: Virtual machine is to be evicted",
            stop=True,
            deadline=BEGINS,
        )
    ]


@pytest.mark.parametrize(
    ("kind", "stop"),
    [("Preempt", True), ("Reboot", True), ("Redeploy", True), ("Terminate", True), ("Freeze", False)],
)
def test_kind_decides_whether_training_stops(kind: str, stop: bool):
    (notice,) = parse(EVENT | {"EventType": kind})
    assert (notice.stop, notice.deadline) == (stop, BEGINS if stop else None)


@pytest.mark.parametrize("begins", ["", None])
def test_event_that_has_started_is_the_same_notice_without_a_deadline(begins: str | None):
    (before,), (after,) = parse(EVENT), parse(EVENT | {"EventStatus": "Started", "NotBefore": begins})
    assert (after.id, after.deadline) == (before.id, None)


@pytest.mark.parametrize(
    ("fields", "now"),
    [
        pytest.param({"Resources": ["vmss_1", "vmss_10"]}, NOW, id="of other VMs"),
        pytest.param({"Resources": []}, NOW, id="of no VM"),
        pytest.param({"EventType": "SpotRebalanceRecommendation"}, NOW, id="of a kind that comes later"),
        pytest.param({}, BEGINS - 901, id="far away"),
    ],
)
def test_other_event_is_no_notice(fields: dict[str, Any], now: float):
    assert parse(EVENT | fields, now=now) == []


def test_name_of_the_vm_has_no_case():
    assert parse(EVENT, vm="VMSS_0") == parse(EVENT)


@pytest.mark.parametrize(
    "fields",
    [
        {"Resources": None},
        {"Resources": "vmss_0"},
        {"Resources": [1]},
        {"EventType": None},
        {"EventId": None},
        {"EventId": "a b"},
        {"NotBefore": "soon"},
        {"NotBefore": 5},
    ],
)
def test_broken_event_is_refused(fields: dict[str, Any]):
    with pytest.raises(LookError):
        parse(EVENT | fields)


@pytest.mark.parametrize("found", [None, [], {}, {"Events": None}, {"Events": {}}, {"Events": [1]}])
def test_broken_document_is_refused(found: object):
    with pytest.raises(LookError):
        scheduled_events(found, "vmss_0", "n1", NOW)


VALUES = (
    st.none() | st.text() | st.integers() | st.lists(st.text()) | st.sampled_from(["", "Reboot", "Freeze"])
)


@given(st.dictionaries(st.sampled_from([*EVENT]), VALUES))
def test_garbage_is_refused_or_a_wellformed_notice(fields: dict[str, Any]):
    try:
        notices = parse(EVENT | fields)
    except LookError:
        return
    assert all(notice.id.isprintable() and notice.reason.isprintable() for notice in notices)


@pytest.fixture
def server() -> Iterator[FakeAzure]:
    with FakeAzure() as running:
        yield running


@pytest.fixture
def source(server: FakeAzure) -> Azure:
    return Azure("n1", base=server.base)


async def test_notices_come_go_and_keep_their_ids(server: FakeAzure, source: Azure):
    assert await source.look() == []
    server.schedule("Preempt")
    server.schedule("Freeze", EventId="another")
    server.schedule("Reboot", Resources=["vmss_7"])
    found = await source.look()
    assert [notice.id.split("/")[1] for notice in found] == ["preempt", "freeze"]
    assert await source.look() == found
    assert await Azure("n1", base=server.base).look() == found
    server.documents[server.EVENTS] = {"DocumentIncarnation": 9, "Events": []}
    assert await source.look() == []


async def test_events_are_read_and_never_acknowledged(server: FakeAzure, source: Azure):
    server.schedule()
    for _ in range(3):
        await source.look()
    assert {one.partition(" ")[0] for one in server.asked} == {"GET"}
    # The VM keeps its name.
    assert len([one for one in server.asked if one.startswith(f"GET {server.NAME}")]) == 1


async def test_first_answer_may_take_its_time(
    server: FakeAzure, source: Azure, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("muster.watcher.sources.azure.FIRST_TIMEOUT", 0.3)
    monkeypatch.setattr("muster.watcher.sources.azure.TIMEOUT", 0.2)
    server.faults[server.EVENTS] = hangs
    assert "within 0.3 s" in await why(source.look)
    del server.faults[server.EVENTS]
    await source.look()
    server.faults[server.EVENTS] = hangs
    assert "within 0.2 s" in await why(source.look)


@pytest.mark.parametrize("vm", ["", "<html>", "a b", "x" * 200])
async def test_vm_without_a_name_is_a_failure(server: FakeAzure, source: Azure, vm: str):
    server.documents[server.NAME] = vm
    assert "gives no name" in await why(source.look)


@pytest.mark.parametrize(
    "fault",
    [
        answers(500),
        answers(404),
        answers(400),
        answers(307, Location="http://127.0.0.1:1/"),
        answers(200, "<html>"),
        answers(200),
        huge,
        truncated,
    ],
)
async def test_broken_server_gives_no_notice(server: FakeAzure, source: Azure, fault):
    server.faults[server.EVENTS] = fault
    assert "scheduledevents" in await why(source.look)
