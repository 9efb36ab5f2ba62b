"""How far the training has come: what a stream tells of it, and when."""

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from muster.worker import step, steps
from muster.worker.steps import StepReporter


@pytest.fixture(autouse=True)
def _nothing_noted() -> Iterator[None]:
    steps._number = None
    yield
    steps._number = None


def test_step_is_reported_once_and_not_too_often():
    news = StepReporter()
    news.welcomed(5.0)
    assert news.interval == 5.0
    assert news.take(100.0) is None
    step(7)
    assert news.take(100.0) == 7
    step(8)
    assert news.take(104.9) is None
    assert news.take(105.0) == 8
    assert news.take(1_000.0) is None


def test_integer_like_step_is_reported():
    news = StepReporter()
    news.welcomed(5.0)
    step(np.int64(7))
    assert news.take(0.0) == 7


def test_forked_child_has_no_step():
    step(7)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if steps._number is None else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert steps._number == 7


def test_step_is_reported_again_on_another_stream():
    step(7)
    for _ in range(2):
        news = StepReporter()
        news.welcomed(5.0)
        assert news.take(0.0) == 7


@pytest.mark.parametrize("interval", [None, 0.0])
def test_step_is_not_reported_to_a_coordinator_that_does_not_ask(interval: float | None):
    news = StepReporter()
    if interval is not None:
        news.welcomed(interval)
    step(7)
    assert news.take(1e9) is None


class Hostile:
    """Can be neither counted nor compared."""

    def __index__(self) -> int:
        raise RuntimeError("not now")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("nor this")

    __hash__ = None  # type: ignore[assignment]


TENSORS = torch.tensor([1, 2]), torch.tensor(3)
NO_STEPS: list[Any] = [-1, 2**63, "7", 7.5, np.array([1, 2]), *TENSORS, Hostile()]


@pytest.mark.parametrize("number", NO_STEPS)
def test_unusable_step_is_not_reported(number: Any):
    news = StepReporter()
    news.welcomed(5.0)
    step(number)
    assert news.take(0.0) is None
    step(0)
    assert news.take(10.0) == 0


def test_jax_array_is_not_fetched_from_its_device(monkeypatch: pytest.MonkeyPatch):
    class Array:
        def __index__(self) -> int:
            return 7

    news = StepReporter()
    news.welcomed(5.0)
    step(Array())
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "jax", SimpleNamespace(Array=Array))
        assert news.take(0.0) is None
    assert news.take(10.0) == 7
