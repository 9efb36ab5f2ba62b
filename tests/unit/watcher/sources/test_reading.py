"""What is taken for JSON, a time, a name or a reason, and what is not."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.patience import PATIENCE
from muster.watcher.notice import Notice
from muster.watcher.polling import LookError
from muster.watcher.sources.reading import (
    MAX_DISTANCE,
    MAX_EVENTS,
    MAX_REASON,
    Look,
    Parts,
    document,
    items,
    mapping,
    name,
    printable,
    utc,
    when,
)

NOW = 1_780_000_000.0
"""2026-05-28T20:26:40Z."""


@pytest.mark.parametrize(
    "text",
    [
        "2026-05-28T20:26:40Z",
        "2026-05-28T20:26:40+00:00",
        "2026-05-28T22:26:40+02:00",
        "2026-05-28T20:26:40.000Z",
        "Thu, 28 May 2026 20:26:40 GMT",
        "28 May 2026 20:26:40 GMT",
    ],
)
def test_time_is_read_in_each_form_of_the_clouds(text: str):
    assert when(text, NOW, "it") == NOW
    assert utc(NOW) == "2026-05-28T20:26:40Z"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "soon",
        "2026-05-28T20:26:40",  # of which zone?
        "2026-05-28",
        "28 May 2026 20:26:40 CET",
        "32 May 2026 20:26:40 GMT",
        "0001-01-01T00:00:00+23:59",
        "9999-12-31T23:59:59-23:59",
        "2025-05-01T00:00:00Z",
        "\x1b[2J2026-05-28T20:26:40Z",
        "9" * 5_000,
    ],
)
def test_other_time_is_refused_and_shown_on_one_short_line(text: str):
    with pytest.raises(LookError, match="it has no usable time") as caught:
        when(text, NOW, "it")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 120


@given(st.text())
def test_time_is_near_or_refused(text: str):
    try:
        found = when(text, NOW, "it")
    except LookError:
        return
    assert abs(found - NOW) <= MAX_DISTANCE


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 60_000, b"9" * 5_000, b"<html>"])
def test_body_that_is_not_json_is_refused(body: bytes):
    with pytest.raises(LookError, match="it is not JSON"):
        document(body, "it")


@given(st.binary())
def test_garbage_is_json_or_refused(body: bytes):
    try:
        found = document(body, "it")
    except LookError:
        return
    json.dumps(found)


@pytest.mark.parametrize("value", [None, {}, "x", [1], [None], [[]], [{}] * (MAX_EVENTS + 1)])
def test_value_that_is_not_a_short_list_of_objects_is_refused(value: object):
    with pytest.raises(LookError):
        items(value, "it")


@pytest.mark.parametrize("value", [None, [], "x", 1])
def test_value_that_is_not_an_object_is_refused(value: object):
    with pytest.raises(LookError):
        mapping(value, "it")


@pytest.mark.parametrize("value", [None, 1, "", "a b", "a\nb", "ä", "x" * 129, ["a"]])
def test_invalid_id_is_refused(value: object):
    with pytest.raises(LookError):
        name({"EventId": value}, "EventId", "it")


@given(st.text())
def test_text_of_others_is_one_printable_line(text: str):
    line = printable(text)
    assert line.isprintable()
    assert len(line) <= MAX_REASON


def noticed(name: str) -> Notice:
    return Notice(id=name, reason="a test")


def says(*steps: list[str] | None) -> Look:
    """Look at a document that says one thing after the other; None: it cannot be read."""
    left = iter(steps)

    async def look() -> list[Notice]:
        step = next(left)
        if step is None:
            raise LookError("broken")
        return [noticed(name) for name in step]

    return look


async def test_broken_document_hides_no_news_of_another():
    parts = Parts((says(["a"], ["a"], [], []), says(None, None, None, ["b"])))
    assert await parts.look() == [noticed("a")]
    with pytest.raises(LookError, match="broken"):
        await parts.look()  # It says nothing new, so the failure is told.
    assert await parts.look() == []
    assert await parts.look() == [noticed("b")]


async def test_broken_document_keeps_what_it_said():
    parts = Parts((says([], ["a"], ["a"]), says(["b"], None, [])))
    assert await parts.look() == [noticed("b")]
    assert await parts.look() == [noticed("a"), noticed("b")]
    assert await parts.look() == [noticed("a")]


async def test_slow_document_is_read_beside_the_others():
    began = [asyncio.Event(), asyncio.Event()]

    async def meets(mine: asyncio.Event, other: asyncio.Event) -> list[Notice]:
        mine.set()
        await other.wait()
        return []

    parts = Parts((lambda: meets(began[0], began[1]), lambda: meets(began[1], began[0])))
    async with asyncio.timeout(PATIENCE):
        assert await parts.look() == []


async def test_failure_is_raised_while_nothing_is_new():
    parts = Parts((says(None, None), says([], [])))
    for _ in range(2):
        with pytest.raises(LookError):
            await parts.look()
