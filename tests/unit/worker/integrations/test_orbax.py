"""Orbax's barrier, without a coordinator: what is said for this process, and what it is told."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint._src.checkpointers import async_checkpointer as place

from muster.worker.decision import Decision, Failure, Outcome
from muster.worker.errors import (
    BarrierAbortedError,
    MemberLostError,
    MusterError,
    OutcomeUnknownError,
    RefusedError,
)
from muster.worker.integrations import orbax as module
from muster.worker.integrations.orbax import GIVEN_UP, SaveBarrier, barrier_sync_fn
from tests.support.expect import raising
from tests.support.saves.scripted_barrier import ScriptedBarrier, decided

KEY = "async_write_complete.7"


def made(*answers: Decision | Exception) -> tuple[SaveBarrier, ScriptedBarrier]:
    """A barrier that will be told this."""
    barrier = ScriptedBarrier()
    for answer in answers:
        barrier.answers.put(answer)
    as_barrier: Any = barrier
    return SaveBarrier(as_barrier), barrier


def aborted() -> Decision:
    """By what this process says."""
    return replace(decided(Outcome.ABORTED), failures=(Failure(0, "here", 6, "why"),))


def collective_error() -> Exception:
    """What a collective of JAX raises whose other process has died."""
    place = {"__name__": "jax.experimental.multihost_utils"}
    exec("def sync(): raise ValueError('Gloo AllGather failed')", place)
    try:
        place["sync"]()  # type: ignore[operator]
    except ValueError as error:
        return error
    raise AssertionError


# ---------------------------------------------------------------------- at a barrier


def test_all_pass_that_come_with_the_same_key():
    wait, barrier = made(decided(rank_0=KEY.encode(), rank_1=KEY.encode()))
    wait(key=KEY, timeout_ms=1000)
    assert barrier.heard() == KEY.encode()


@pytest.mark.parametrize(
    ("outcome", "kind"), [(Outcome.ABORTED, BarrierAbortedError), (Outcome.MEMBER_LOST, MemberLostError)]
)
def test_failed_rank_is_named_and_a_known_failure_is_not_reported_again(
    outcome: Outcome, kind: type[Exception]
):
    wait, barrier = made(decided(outcome))
    with pytest.raises(kind, match=r"rank 1 .* is to blame") as caught:
        wait(key=KEY, timeout_ms=1000)
    assert wait.failed(caught.value) is None
    assert barrier.heard() == KEY.encode()
    assert barrier.said.empty()


def test_processes_at_different_barriers_are_told_where_each_is():
    wait, _ = made(decided(rank_0=KEY.encode(), rank_1=b"async_write_complete.8"))
    with pytest.raises(MusterError, match="out of step") as caught:
        wait(key=KEY, timeout_ms=1000)
    assert f"process 0 at '{KEY}'; process 1 at 'async_write_complete.8'" in str(caught.value)


def test_process_that_gave_up_is_named():
    wait, _ = made(decided(rank_0=KEY.encode(), rank_1=GIVEN_UP.encode()))
    with pytest.raises(MusterError, match=r"given up: a collective of JAX failed in it on processes \[1\]"):
        wait(key=KEY, timeout_ms=1000)


def test_while_the_coordinator_is_away_it_goes_on_asking(caplog: pytest.LogCaptureFixture):
    away = OutcomeUnknownError("no answer", "checkpoint/orbax", 0, Outcome.UNKNOWN)
    wait, barrier = made(away, decided(rank_0=KEY.encode(), rank_1=KEY.encode()))
    wait(key=KEY, timeout_ms=1000)
    assert [barrier.heard(), barrier.heard()] == [KEY.encode()] * 2
    assert "a save waits: no answer" in caplog.text


def test_orbax_may_have_no_time_left():
    wait, _ = made(decided(rank_0=KEY.encode()))
    wait(key=KEY, timeout_ms=0)


# ---------------------------------------------------------------------- a failure


def test_a_failure_is_said_once_with_its_reason():
    wait, barrier = made(aborted())
    error = OSError(28, "No space left on device")
    assert wait.failed(error) is None
    assert wait.failed(error) is None
    assert str(barrier.heard()).startswith("OSError: [Errno 28] No space left on device")
    assert barrier.said.empty()


def test_failing_rank_is_told_of_the_earlier_failure_of_another_rank():
    wait, _ = made(decided(Outcome.ABORTED))
    assert isinstance(wait.failed(OSError(28, "No space left on device")), BarrierAbortedError)


def test_failed_collective_is_explained_by_the_lost_rank():
    wait, barrier = made(decided(Outcome.MEMBER_LOST))
    assert isinstance(wait.failed(collective_error()), MemberLostError)
    assert barrier.heard() == GIVEN_UP.encode()


def test_a_failure_that_cannot_be_told_takes_no_others_place(caplog: pytest.LogCaptureFixture):
    wait, _ = made(RefusedError("another speaks for rank 0.", "SESSION_REPLACED"))
    assert wait.failed(OSError(28, "No space left on device")) is None
    assert "the others do not hear why: another speaks for rank 0." in caplog.text


def test_one_process_alone_waits_for_nobody():
    wait = barrier_sync_fn()
    wait(key=KEY, timeout_ms=1000)
    assert wait.failed(OSError()) is None


def test_each_function_has_a_group_of_its_own(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(module, "_numbers", iter([1, 2]))
    monkeypatch.setattr(module, "GroupBarrier", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 3)
    barrier_sync_fn()
    barrier_sync_fn()
    assert asked == [(3, 4, "checkpoint/orbax"), (3, 4, "checkpoint/orbax-2")]


# ---------------------------------------------------------------------- in Orbax's saves


def checkpointer(wait: SaveBarrier, **options: Any) -> Any:
    return ocp.AsyncCheckpointer(
        ocp.StandardCheckpointHandler(), async_options=ocp.AsyncOptions(barrier_sync_fn=wait, **options)
    )


def state() -> Any:
    return ocp.args.StandardSave({"weights": np.zeros(2)})


def test_error_in_a_save_thread_is_reported_by_that_save_and_not_by_the_next(tmp_path: Path):
    wait, barrier = made(aborted())
    saver = checkpointer(wait, post_finalization_callback=raising(OSError, 28, "No space left on device"))
    saver.save(tmp_path / "7", args=state())
    with pytest.raises(OSError, match="No space left"):
        saver.save(tmp_path / "8", args=state())
    assert str(barrier.heard()).startswith("OSError: [Errno 28] No space left on device")
    assert barrier.said.empty()
    saver.close()


def test_error_before_the_save_thread_starts_is_reported(tmp_path: Path):
    wait, barrier = made(aborted())
    saver = checkpointer(wait)
    (tmp_path / "7").mkdir()
    with pytest.raises(ValueError, match="already exists"):
        saver.save(tmp_path / "7", args=state())
    assert "already exists" in str(barrier.heard())
    saver.close()


def test_error_of_a_checkpoint_manager_is_reported(tmp_path: Path):
    passed = decided(rank_0=b"")
    wait, barrier = made(*[passed] * 6, aborted())
    options = ocp.CheckpointManagerOptions(async_options=ocp.AsyncOptions(barrier_sync_fn=wait))
    saver: Any = ocp.CheckpointManager(tmp_path, options=options)
    saver.save(1, args=state())
    saver.wait_until_finished()
    with pytest.raises(ValueError, match="already exists"):
        saver.save(1, args=state(), force=True)
    said = [str(barrier.heard()) for _ in range(7)]
    assert ["already exists" in word for word in said] == [False] * 6 + [True]
    saver.close()


def test_another_barrier_is_none_of_ours(tmp_path: Path):
    heard: list[str] = []

    def theirs(*, key: str, timeout_ms: int) -> None:
        heard.append(key)

    saver: Any = ocp.AsyncCheckpointer(
        ocp.StandardCheckpointHandler(), async_options=ocp.AsyncOptions(barrier_sync_fn=theirs)
    )
    (tmp_path / "7").mkdir()
    with pytest.raises(ValueError, match="already exists"):
        saver.save(tmp_path / "7", args=state())
    saver.save(tmp_path / "8", args=state())
    saver.close()


def test_another_checkpointer_is_an_import_error(monkeypatch: pytest.MonkeyPatch):
    assert module.__file__
    monkeypatch.setattr(place, "_background_wait_for_commit_futures", lambda: None)
    with pytest.raises(ImportError, match=r"tried with orbax-checkpoint .* here .* differs"):
        runpy.run_path(module.__file__)
