"""What users hand over to be saved."""

from typing import Any

import pytest

from muster.worker.errors import AsyncSaveError
from muster.worker.saves import AsyncRequest
from tests.support.saves.fake_barrier import FakeBarrier


def test_finalize_functions_are_added_until_it_is_frozen():
    called: list[int] = []
    request = AsyncRequest(None, (), [lambda: called.append(1)])
    request.add_finalize_fn(lambda: called.append(2))
    frozen = request.freeze()
    with pytest.raises(RuntimeError, match="frozen"):
        frozen.add_finalize_fn(lambda: called.append(3))
    frozen.execute_finalize_fns()
    assert called == [1, 2]
    assert (request.is_frozen, frozen.is_frozen) == (False, True)


@pytest.mark.parametrize(
    "request_",
    [
        AsyncRequest("write", (), []),  # type: ignore[arg-type]
        AsyncRequest(None, (), [], preload_fn=7),  # type: ignore[arg-type]
        AsyncRequest(None, (), [print, None]),  # type: ignore[list-item]
    ],
    ids=["async_fn", "preload_fn", "finalize_fns"],
)
def test_request_with_a_function_that_is_not_callable_is_refused(request_: AsyncRequest):
    with pytest.raises(TypeError, match=r"callable|must be a function"):
        request_.check()


def test_result_of_the_preload_function_is_the_second_argument():
    seen: list[Any] = []
    request = AsyncRequest(lambda *args: seen.append(args), ("path", "on the GPU", 3), [], {}, lambda: "here")
    request.preloaded().write()
    assert seen == [("path", "here", 3)]
    assert AsyncRequest(None, ("path",), []).preloaded().async_fn_args == ("path",)


def test_it_is_written_at_once_and_finalized_if_all_have_written():
    order: list[Any] = []
    request = AsyncRequest(
        lambda *a, **k: order.append((a, k)), (1,), [lambda: order.append("end")], {"x": 2}
    )
    request.execute_sync(FakeBarrier())  # type: ignore[arg-type]
    assert order == [((1,), {"x": 2}), "end"]


def test_a_write_at_once_that_fails_is_told_to_all():
    barrier, finalized = FakeBarrier(), []
    with pytest.raises(AsyncSaveError, match="ZeroDivisionError"):
        AsyncRequest(lambda: 1 / 0, (), [lambda: finalized.append(1)]).execute_sync(barrier)  # type: ignore[arg-type]
    assert barrier.votes[0] is not None
    assert finalized == []


def test_a_write_at_once_is_not_finalized_if_another_rank_failed():
    barrier, finalized = FakeBarrier(world_size=2), []
    barrier.others_fail[0] = "no space left"
    with pytest.raises(AsyncSaveError, match="no space left") as caught:
        AsyncRequest(None, (), [lambda: finalized.append(1)]).execute_sync(barrier)  # type: ignore[arg-type]
    assert [one.rank for one in caught.value.failures] == [1]
    assert finalized == []
