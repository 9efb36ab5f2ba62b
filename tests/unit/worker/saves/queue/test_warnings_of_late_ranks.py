"""When a rank that has written logs which ranks its save still waits for."""

from contextlib import suppress

import pytest

from muster.worker.errors import AsyncSaveError
from muster.worker.saves import AsyncCallsQueue, AsyncRequest
from muster.worker.saves.queue import voter
from tests.support.saves.fake_barrier import FakeBarrier


@pytest.fixture
def barrier() -> FakeBarrier:
    return FakeBarrier()


def nothing() -> None:
    """Written at once."""


def test_first_save_warns_early_of_ranks_that_may_not_make_it(barrier: FakeBarrier):
    with AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]
        barrier.others_fail[0] = "no space left"
        for _ in range(2):
            queue.schedule_async_request(AsyncRequest(nothing, (), []))
            with suppress(AsyncSaveError):
                queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
    failed, first = barrier.early
    assert failed is not None
    assert first is not None
    assert first.after >= voter.EARLY_WARNING
    assert 'barrier=GrpcBarrier(barrier_prefix="save-0", participants=[0])' in first.hint


@pytest.mark.parametrize(("longest", "after"), [(0.0, 60.0), (20.0, 60.0), (21.0, 120.0), (100.0, 480.0)])
def test_later_save_warns_when_it_waits_for_much_longer_than_those_before(
    barrier: FakeBarrier, longest: float, after: float
):
    with AsyncCallsQueue(barrier=barrier) as queue:  # type: ignore[arg-type]
        for _ in range(2):
            queue.schedule_async_request(AsyncRequest(nothing, (), []))
            queue.maybe_finalize_async_calls(blocking=True, no_dist=True)
            queue._loop.voter._longest_wait = longest
    _, later = barrier.early
    assert later is not None
    assert later.after == after
    assert "muster stack job shows" in later.hint
