"""A coordinator that is killed more often than a timeout lets nobody wait on and on."""

from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

import pytest

from muster.worker import ConnectError, CoordinatorStore, StoreTimeoutError
from muster.worker.attendance import Attendance, NodeConfig
from muster.worker.errors import RefusedError
from tests.support.coordinator import Coordinator
from tests.support.meeting import in_thread
from tests.support.patience import PATIENCE
from tests.support.ranks import everyone, ranks

TIMEOUT = 8
LIFE = 5.0
"""Seconds between two kills: less than the timeout, and enough to come back."""
MOST_LIVES = 8

pytestmark = pytest.mark.back_in_time


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Coordinator]:
    """One that gives no rank up meanwhile."""
    with Coordinator(tmp_path, session_ttl=60) as coordinator:
        yield coordinator


@pytest.fixture
def node(patient: Coordinator) -> Iterator[Attendance]:
    config = NodeConfig(
        endpoint=patient.endpoint,
        run_id="alone",
        address="node-0",
        min_nodes=2,
        max_nodes=2,
        join_timeout=TIMEOUT,
        last_call_timeout=1,
        keep_alive_timeout=60,
        connect_timeout=PATIENCE,
        call_timeout=1,
    )
    node = Attendance(config)
    yield node
    node.leave("the test is over")


def test_barriers_joins_and_waits_for_keys_time_out(patient: Coordinator, node: Attendance):
    store = CoordinatorStore(patient.endpoint, "alone")
    with ranks(patient.endpoint, 2) as (zero, one):
        everyone([zero, one])
        zero.tell("barrier", timeout=float(TIMEOUT))
        join: Future[object] = in_thread(node.join)
        wait: Future[None] = in_thread(lambda: store.wait(["never"], timedelta(seconds=TIMEOUT)))
        for _ in range(MOST_LIVES):
            # An idle wait is wanted here: that is how long the coordinator lives.
            zero.wait_for_answer(LIFE)
            if zero.has_answered() and join.done() and wait.done():
                break
            patient.kill()
            patient.start()
        else:
            pytest.fail("they wait on and on")
        heard = zero.answer()
        assert (heard.outcome, heard.missing_ranks) == ("TIMED_OUT", [1])
        assert f"timed out after {TIMEOUT} s" in heard.message
        assert one.ask("barrier").outcome == "TIMED_OUT"
    refused = join.exception(0)
    assert isinstance(refused, RefusedError)
    assert refused.reason == "RENDEZVOUS_TIMED_OUT"
    # The store asks again until its own time is over, and its end may find no coordinator.
    assert isinstance(wait.exception(0), StoreTimeoutError | ConnectError)
