from types import SimpleNamespace

import pytest

from muster.worker.errors import RefusedError
from muster.worker.groups import pending as module
from muster.worker.groups.pending import MAX_REASON_BYTES, EarlyWarning, check_payload, pending


def test_early_warning_is_requested_and_its_hint_logged_once():
    one = pending("save", 3, 60.0, 0, b"", None, EarlyWarning(0.25, "look at rank 1"))
    assert (one.request.timeout_ms, one.request.progress_after_ms) == (60_000, 250)
    assert one.warning("rank 1 is missing") == "rank 1 is missing\n  look at rank 1"
    assert one.warning("rank 1 is missing") == "rank 1 is missing"


def test_warning_without_a_hint_is_the_coordinators():
    one = pending("save", 3, 60.0, 0, b"", None, None)
    assert one.request.progress_after_ms == 0
    assert one.warning("rank 1 is missing") == "rank 1 is missing"


def test_reason_is_made_valid_utf_8_and_cut():
    (arrival,) = pending("save", 0, 1.0, 2, b"p", "\udc80" + "x" * 100_000, None).request.arrivals
    assert (arrival.rank, arrival.payload) == (2, b"p")
    assert arrival.failure.startswith("\\udc80xxx")
    assert len(arrival.failure) == MAX_REASON_BYTES


def test_payload_is_limited_to_what_the_coordinator_accepts():
    check_payload(b"12", 2)
    check_payload(b"123", None)
    with pytest.raises(RefusedError, match="a payload of 3 bytes: the coordinator takes 2"):
        check_payload(b"123", 2)


def test_repeated_arrival_states_how_long_it_has_waited(monkeypatch: pytest.MonkeyPatch):
    now = [50.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = pending("save", 3, 60.0, 0, b"p", None, None)
    now[0] += 9.0
    first = one.message()
    assert (first.arrive.waited_ms, first.arrive.timeout_ms) == (0, 60_000), "it was not said before"
    now[0] += 12.5
    assert one.message().arrive.waited_ms == 12_500
    now[0] += 1.0
    again = one.message()
    assert again.arrive.waited_ms == 13_500
    assert first.arrive.waited_ms == 0, "what waits to be sent is not changed"
    again.arrive.waited_ms = 0
    assert again == first
