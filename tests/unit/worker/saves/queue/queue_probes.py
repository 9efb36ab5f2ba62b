"""Writes for a queue to run, and probes of its decisions and threads."""

import os
import signal
import threading
from typing import Any

import pytest

from lab.patience import until
from muster.worker.decision import Decision, Outcome
from muster.worker.errors import OutcomeUnknownError
from muster.worker.saves import AsyncCallsQueue
from muster.worker.saves.queue.states import QueueState
from tests.support.saves.fake_barrier import FakeBarrier


def nothing() -> None:
    """Write nothing."""


def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def gone() -> OutcomeUnknownError:
    return OutcomeUnknownError("gone", "save", 0, Outcome.UNKNOWN)


def threads_of_queues() -> set[threading.Thread]:
    """Those that run; of other tests' queues until these are collected."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("muster-saves")}


def decided(queue: AsyncCallsQueue) -> int:
    return queue._loop.view.ready


def away_until_closing(barrier: FakeBarrier, queues: list[AsyncCallsQueue]) -> None:
    """The coordinator does not answer a vote before the queue closes, nor then."""

    def vote(*_: Any, **__: Any) -> Decision:
        until(lambda: queues[0]._loop.view.state is QueueState.CLOSING)
        raise gone()

    barrier.vote = vote  # type: ignore[method-assign]


def refuse_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        theirs(thread)

    theirs = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
