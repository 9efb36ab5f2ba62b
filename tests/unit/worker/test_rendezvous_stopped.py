"""The rendezvous handler of a stopped run: agents end at once, with the exit code for schedulers."""

import signal
import sys
from collections.abc import Iterator
from contextlib import suppress

import pytest
from torch.distributed import PrefixStore
from torch.distributed.elastic.multiprocessing.api import SignalException

from muster.client.errors import EnvironmentValueError
from muster.worker import exit_barrier
from muster.worker.errors import ConnectError
from muster.worker.store import CoordinatorStore
from tests.unit.worker.fake_membership import made, without_coordinator


@pytest.fixture(autouse=True)
def _no_coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from without_coordinator(monkeypatch)


def test_shutdown_of_a_stopped_run_exits_with_the_code_for_schedulers():
    handler, membership = made()
    membership.stopped = True
    with pytest.raises(SystemExit, match="75"):
        handler.shutdown()
    assert membership.done == ["leave"]


def test_shutdown_returns_if_the_exit_code_of_a_stopped_run_is_0(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MUSTER_STOPPED_EXIT_CODE", "0")
    handler, membership = made()
    membership.stopped = True
    assert handler.shutdown() is False


def test_agent_learns_from_the_coordinator_that_its_run_was_stopped(monkeypatch: pytest.MonkeyPatch):
    handler, membership = made()

    def close(reason: str, timeout: float) -> None:
        membership.stopped = True

    monkeypatch.setattr(membership, "close", close)
    with pytest.raises(SystemExit, match="75"):
        handler.shutdown()


def test_agent_that_knows_of_the_stop_does_not_wait_for_the_coordinator():
    handler, membership = made()
    membership.stopped = True
    membership.answer = ConnectError("away")
    with pytest.raises(SystemExit, match="75"):
        handler.shutdown()
    assert membership.done == ["leave"]


def test_agent_asks_again_if_the_stopped_run_was_closed():
    handler, membership = made()
    membership.stopped, membership.closed = True, True
    with pytest.raises(SystemExit, match="75"):
        handler.shutdown()
    assert membership.done == ["close 30", "leave"]


def test_agents_store_notes_the_arrival_at_torchs_exit_barrier(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CoordinatorStore, "add", lambda store, key, value: 1)
    handler, _ = made()
    keys = PrefixStore("round", handler._store)
    keys.add("another", 1)
    assert not handler._store.waits_at_exit.is_set()
    keys.add(exit_barrier.ARRIVED, 1)
    assert handler._store.waits_at_exit.is_set()


@pytest.mark.parametrize("during", ["close", "leave"])
@pytest.mark.parametrize("stopped", [True, False])
def test_signal_during_shutdown_leaves_the_exit_code_to_the_hook(
    monkeypatch: pytest.MonkeyPatch, during: str, stopped: bool
):
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    handler, membership = made()
    error = SignalException("terminated", signal.SIGTERM)

    def interrupted(*_: object) -> None:
        membership.stopped = stopped
        raise error

    monkeypatch.setattr(membership, during, interrupted)
    with pytest.raises(SignalException):
        handler.shutdown()
    with suppress(SystemExit):
        sys.excepthook(SignalException, error, None)
        assert not stopped
    assert shown == ([] if stopped else [error])


def test_signal_after_shutdown_of_a_stopped_run_does_not_change_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    handler, membership = made()
    membership.stopped = True
    with pytest.raises(SystemExit, match="75"):
        handler.shutdown()
    with pytest.raises(SystemExit, match="75"):
        sys.excepthook(SignalException, SignalException("terminated", signal.SIGTERM), None)


@pytest.mark.parametrize("value", ["-1", "256", "75.0", "temporary"])
def test_exit_code_of_a_stopped_run_is_checked(monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("MUSTER_STOPPED_EXIT_CODE", value)
    with pytest.raises(EnvironmentValueError, match=f"MUSTER_STOPPED_EXIT_CODE ?= ?{value}"):
        made()


@pytest.mark.parametrize(("stopped", "code"), [(True, 76), (False, None)])
def test_hook_gives_an_agent_ended_by_a_signal_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, stopped: bool, code: int | None
):
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    monkeypatch.setenv("MUSTER_STOPPED_EXIT_CODE", "76")
    handler, membership = made()
    membership.stopped = stopped
    error = SignalException("terminated", signal.SIGTERM)
    if code is None:
        sys.excepthook(SignalException, error, None)
        assert shown == [error]
    else:
        with pytest.raises(SystemExit, match=str(code)):
            sys.excepthook(SignalException, error, None)
        assert not shown
        # Any other error is shown as well.
        failure = ValueError("a fault")
        with pytest.raises(SystemExit, match=str(code)):
            sys.excepthook(ValueError, failure, None)
        assert shown == [failure]
    handler.shutdown() if not stopped else handler._membership.leave("")
