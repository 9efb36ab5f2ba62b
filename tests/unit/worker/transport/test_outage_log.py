"""What the log says while no coordinator can be reached."""

import pytest

from muster.worker.transport.outage_log import FIRST_REMINDER, OutageLog


def test_outage_is_logged_early_and_then_less_and_less_often(caplog: pytest.LogCaptureFixture):
    now = 100.0
    outage = OutageLog("head:7550", lambda: now)
    logged = []
    for _ in range(100):
        outage.failed(f"refused at {now:g}")
        logged += [(now - 100, record.getMessage()) for record in caplog.records]
        caplog.clear()
        now += 1
    assert [at for at, _ in logged] == [FIRST_REMINDER, 2 * FIRST_REMINDER, 20, 40, 80]
    assert logged[0][1] == (
        "the coordinator at head:7550 has been out of reach for 5 s (refused at 105); trying again"
    )


def test_short_outage_is_not_logged(caplog: pytest.LogCaptureFixture):
    now = 0.0
    outage = OutageLog("head:7550", lambda: now)
    for _ in range(10):
        outage.failed("refused")
        now += FIRST_REMINDER - 1
        outage.failed("refused")
        outage.over()
    assert not caplog.records
