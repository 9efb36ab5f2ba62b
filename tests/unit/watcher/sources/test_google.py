"""Google Compute Engine: which values are notices, and how the reader gets them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.watching.metadata import FakeGoogle, answers, huge, iso, truncated
from muster.watcher.notice import Notice
from muster.watcher.polling import LookError
from muster.watcher.source import SourceError
from muster.watcher.sources import google
from muster.watcher.sources.google import Google, maintenance, preemption, upcoming
from tests.unit.watcher.sources.failing import why

NOW = 1_780_000_000.0
WINDOW = {
    "can_reschedule": "true",
    "latest_window_start_time": "2026-05-28T20:30:00Z",
    "maintenance_status": "PENDING",
    "type": "SCHEDULED",
    "window_start_time": "2026-05-28T20:30:00Z",
    "window_end_time": "2026-05-28T22:30:00+00:00",
}
OPENS = NOW + 200


def test_preempted_vm_has_30_s():
    (notice,) = preemption("TRUE", "n1", "boot", NOW)
    reason = "Google preempts the VM n1"
    assert notice == Notice(id="google/preempted/n1/boot", reason=reason, stop=True, deadline=NOW + 30)
    assert preemption("FALSE", "n1", "boot", NOW) == []


def test_maintenance_stops_a_vm_that_cannot_move():
    assert maintenance("NONE", "n1", "boot", NOW) == []
    (notice,) = maintenance("TERMINATE_ON_HOST_MAINTENANCE", "n1", "boot", NOW)
    assert (notice.id, notice.stop, notice.deadline) == ("google/maintenance/n1/boot", True, None)


def test_vm_that_moves_saves_and_goes_on():
    (notice,) = maintenance("MIGRATE_ON_HOST_MAINTENANCE", "n1", "boot", NOW)
    assert (notice.id, notice.stop) == ("google/migration/n1/boot/2026-05-28T20:00:00Z", False)


@pytest.mark.parametrize("value", ["", "true", "TRUE TRUE", "<html>", "\x1b[2J"])
def test_other_value_is_refused(value: str):
    for parse in (preemption, maintenance):
        with pytest.raises(LookError) as caught:
            parse(value, "n1", "boot", NOW)
        assert str(caught.value).isprintable()


def test_upcoming_maintenance_stops_before_its_window_opens():
    (notice,) = upcoming(WINDOW, "n1", NOW)
    assert (notice.id, notice.stop) == ("google/upcoming/n1/2026-05-28T20:30:00Z", True)
    assert notice.deadline == OPENS


@pytest.mark.parametrize(
    ("found", "now"),
    [
        pytest.param("NONE", NOW, id="none"),
        pytest.param({}, NOW, id="empty"),
        pytest.param(
            {"error": "no notifications have been received yet, try again later"}, NOW, id="not yet"
        ),
        pytest.param(WINDOW, OPENS - 901, id="far away"),
        pytest.param(WINDOW, OPENS + 7201, id="over"),
    ],
)
def test_maintenance_that_is_not_near_is_no_notice(found: object, now: float):
    assert upcoming(found, "n1", now) == []


@pytest.mark.parametrize("now", [OPENS - 899, OPENS, OPENS + 7199])
def test_maintenance_that_is_near_or_under_way_is_a_notice(now: float):
    assert len(upcoming(WINDOW, "n1", now)) == 1


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        "SOON",
        {"type": "SCHEDULED"},
        {"window_start_time": 1},
        {"window_start_time": "soon"},
        WINDOW | {"window_end_time": None},
    ],
)
def test_other_window_is_refused(found: object):
    with pytest.raises(LookError):
        upcoming(found, "n1", NOW)


@given(st.dictionaries(st.sampled_from([*WINDOW]), st.none() | st.text() | st.integers()) | st.text())
def test_garbage_is_refused_or_a_wellformed_notice(found: Any):
    try:
        notices = upcoming(found, "n1", NOW)
    except LookError:
        return
    assert all(notice.id.isprintable() for notice in notices)


@pytest.fixture
def server() -> Iterator[FakeGoogle]:
    with FakeGoogle() as running:
        yield running


@pytest.fixture
def source(server: FakeGoogle) -> Google:
    return Google("n1", base=server.base, boot="boot")


async def kinds(source: Google) -> list[str]:
    return [notice.id.split("/")[1] for notice in await source.look()]


async def test_notices_come_go_and_keep_their_ids(server: FakeGoogle, source: Google):
    assert await kinds(source) == []
    server.preempt()
    server.maintain()
    server.announce_maintenance()
    found = await source.look()
    assert [notice.id.split("/")[1] for notice in found] == ["preempted", "maintenance", "upcoming"]
    assert await source.look() == found
    again = await Google("n1", base=server.base, boot="boot").look()
    assert [notice.id for notice in again] == [notice.id for notice in found]
    server.documents |= {server.PREEMPTED: "FALSE", server.MAINTENANCE: "NONE", server.UPCOMING: {}}
    assert await source.look() == []


async def test_preemption_counts_from_when_it_was_first_seen(server: FakeGoogle):
    now = NOW
    source = Google("n1", base=server.base, boot="boot", clock=lambda: now)
    await source.look()
    now = NOW + 10
    server.preempt()
    (first,) = await source.look()
    now = NOW + 20
    assert await source.look() == [first]
    assert first.deadline == NOW + 40


async def test_broken_value_in_between_moves_no_deadline(server: FakeGoogle):
    now = NOW
    source = Google("n1", base=server.base, boot="boot", clock=lambda: now)
    server.documents[server.PREEMPTED] = "<html>"
    await why(source.look)
    now = NOW + 10
    server.preempt()
    found = await source.look()
    server.documents[server.PREEMPTED] = "<html>"
    await why(source.look)
    now = NOW + 20
    server.preempt()
    assert await source.look() == found
    assert found[0].deadline == NOW + 40


async def test_each_move_is_a_notice_with_one_id(server: FakeGoogle):
    now = NOW
    source = Google("n1", base=server.base, boot="boot", clock=lambda: now)
    server.maintain("MIGRATE_ON_HOST_MAINTENANCE")
    first = await source.look()
    now = NOW + 3_600  # Into the next hour.
    assert await source.look() == first
    server.maintain("NONE")
    assert await source.look() == []
    server.maintain("MIGRATE_ON_HOST_MAINTENANCE")
    assert [notice.id for notice in await source.look()] != [notice.id for notice in first]


async def test_vm_that_moves_ignores_the_window_of_its_host(server: FakeGoogle, source: Google):
    server.documents[server.POLICY] = "MIGRATE"
    server.announce_maintenance()
    assert await kinds(source) == []


@pytest.mark.parametrize(
    "fault",
    [
        answers(404),
        answers(503, '{ "error": "no notifications have been received yet, try again later" }'),
    ],
)
async def test_vm_without_upcoming_maintenance_is_no_failure(server: FakeGoogle, source: Google, fault):
    server.faults[server.UPCOMING] = fault
    assert await kinds(source) == []
    server.preempt()
    assert await kinds(source) == ["preempted"]


async def test_other_server_is_not_believed(server: FakeGoogle, source: Google):
    server.faults[server.PREEMPTED] = answers(200, "TRUE")  # Without the header.
    assert "is not Google's metadata server" in await why(source.look)


@pytest.mark.parametrize(
    "fault",
    [
        answers(500),
        answers(404),
        answers(302, Location="/computeMetadata/v1/instance/preempted-too"),
        answers(200, "<html>", **{"Metadata-Flavor": "Google"}),
        answers(200, **{"Metadata-Flavor": "Google"}),
        huge,
        truncated,
    ],
)
async def test_broken_server_gives_no_notice(server: FakeGoogle, source: Google, fault):
    server.faults[server.PREEMPTED] = fault
    assert "preempted" in await why(source.look)


async def test_life_of_the_vm_is_the_kernels_by_default(server: FakeGoogle):
    server.preempt()
    ids = {(await Google("n1", base=server.base).look())[0].id for _ in range(2)}
    assert len(ids) == 1


def test_sandbox_without_the_kernels_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(google, "BOOT_ID", tmp_path / "boot_id")
    with pytest.raises(SourceError, match=r"cannot read .*boot_id: No such file"):
        Google("n1")


def test_times_are_those_of_the_metadata():
    assert upcoming(WINDOW | {"window_start_time": iso(OPENS)}, "n1", NOW) == upcoming(WINDOW, "n1", NOW)
