"""How far the training has come: what a stream tells of it, and when."""

from collections.abc import Iterator

import pytest

from muster.worker import step, steps
from muster.worker.steps import News


@pytest.fixture(autouse=True)
def _nothing_noted() -> Iterator[None]:
    steps._number = None
    yield
    steps._number = None


def test_a_step_is_told_once_and_not_too_often():
    news = News()
    news.welcomed(5.0)
    assert news.interval == 5.0
    assert news.take(100.0) is None
    step(7)
    assert news.take(100.0) == 7
    step(8)
    assert news.take(104.9) is None
    assert news.take(105.0) == 8
    assert news.take(1_000.0) is None


def test_another_stream_tells_it_again():
    step(7)
    for _ in range(2):
        news = News()
        news.welcomed(5.0)
        assert news.take(0.0) == 7


@pytest.mark.parametrize("interval", [None, 0.0])
def test_nothing_is_told_to_a_coordinator_that_does_not_ask_for_it(interval: float | None):
    news = News()
    if interval is not None:
        news.welcomed(interval)
    step(7)
    assert news.take(1e9) is None


@pytest.mark.parametrize("number", [-1, 2**63, "7", 7.5])
def test_what_is_no_number_of_a_step_is_not_told(number: int):
    news = News()
    news.welcomed(5.0)
    step(number)
    assert news.take(0.0) is None
    step(0)
    assert news.take(10.0) == 0
