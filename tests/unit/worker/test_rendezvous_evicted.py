"""The agent of a node that was evicted leaves its run open, and asks the scheduler to start it again."""

import signal
import sys
from collections.abc import Iterator

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from muster.worker.errors import RefusedError
from tests.unit.worker.fake_membership import made, without_coordinator


@pytest.fixture(autouse=True)
def _no_coordinator(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from without_coordinator(monkeypatch)


def test_shutdown_of_an_evicted_node_leaves_the_run_open_and_exits_with_the_code():
    handler, membership = made()
    membership.evicted = True
    with pytest.raises(SystemExit, match="75"):
        handler.shutdown()
    assert membership.done == ["leave"]


@pytest.mark.parametrize("gracefully", [False, True])
def test_exit_of_an_evicted_node_reports_only_real_failures(
    caplog: pytest.LogCaptureFixture, gracefully: bool
):
    handler, membership = made()
    membership.evicted = True
    if gracefully:
        membership.answer = RefusedError("it was evicted", "NODE_EVICTED")
        with pytest.raises(RendezvousGracefulExitError):
            handler.next_rendezvous()
    with pytest.raises(SystemExit):
        try:
            raise AttributeError("torch has no result")
        finally:
            handler.shutdown()
    assert f"run {handler.get_run_id()} goes on without this node: exit code 75" in caplog.text
    assert ("although this agent failed" in caplog.text) is not gracefully


def test_agent_that_a_signal_ends_after_its_eviction_exits_with_the_code(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    handler, membership = made()
    membership.evicted = True
    with pytest.raises(SystemExit, match="75"):
        sys.excepthook(SignalException, SignalException("terminated", signal.SIGTERM), None)
    handler._membership.leave("")
