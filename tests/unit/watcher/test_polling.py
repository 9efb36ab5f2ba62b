import logging

import pytest

from muster.watcher.notice import Notice
from muster.watcher.polling import LookError, Polled

NOTICE = Notice(id="test/a", reason="why")


class Ended(Exception):
    """The source has been asked often enough."""


def polled(looks: list[list[Notice] | Exception]) -> tuple[Polled, list[float]]:
    """A source that gives these answers, and the pauses that it makes."""
    pauses: list[float] = []

    async def look() -> list[Notice]:
        if not looks:
            raise Ended
        answer = looks.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    return Polled("test", look, 5.0, pause), pauses


async def reports(source: Polled) -> list[list[Notice]]:
    found: list[list[Notice]] = []
    with pytest.raises(Ended):
        await source.watch(lambda notices: found.append(list(notices)))
    return found


async def test_each_look_is_reported():
    source, pauses = polled([[], [NOTICE], []])
    assert await reports(source) == [[], [NOTICE], []]
    assert pauses == [5.0] * 3


async def test_notices_stay_in_force_while_looks_fail():
    source, pauses = polled([[NOTICE], LookError("no route"), LookError("no route")])
    assert await reports(source) == [[NOTICE]]
    assert pauses == [5.0] * 3


async def test_failure_is_logged_once_until_it_changes(caplog: pytest.LogCaptureFixture):
    looks: list[list[Notice] | Exception] = [
        LookError("no route"),
        LookError("no route"),
        LookError("HTTP 500"),
        [],
        [],
        LookError("no route"),
    ]
    source, _ = polled(looks)
    with caplog.at_level(logging.INFO):
        await reports(source)
    assert [record.getMessage() for record in caplog.records] == [
        "source test: no route",
        "source test: HTTP 500",
        "source test answers again",
        "source test: no route",
    ]
