import pytest

from muster.worker.errors import RefusedError
from muster.worker.pending import MOST_REASON_BYTES, EarlyWarning, check_payload, pending


def test_an_early_warning_is_asked_for_and_its_hint_is_logged_once():
    one = pending("save", 3, 60.0, 0, b"", None, EarlyWarning(0.25, "look at rank 1"))
    assert (one.request.timeout_ms, one.request.progress_after_ms) == (60_000, 250)
    assert one.warning("rank 1 is missing") == "rank 1 is missing\n  look at rank 1"
    assert one.warning("rank 1 is missing") == "rank 1 is missing"


def test_without_one_the_coordinator_warns_when_it_does():
    one = pending("save", 3, 60.0, 0, b"", None, None)
    assert one.request.progress_after_ms == 0
    assert one.warning("rank 1 is missing") == "rank 1 is missing"


def test_a_reason_is_made_sayable_and_cut():
    (arrival,) = pending("save", 0, 1.0, 2, b"p", "\udc80" + "x" * 100_000, None).request.arrivals
    assert (arrival.rank, arrival.payload) == (2, b"p")
    assert arrival.failure.startswith("\\udc80xxx")
    assert len(arrival.failure) == MOST_REASON_BYTES


def test_a_payload_is_as_large_as_the_coordinator_takes():
    check_payload(b"12", 2)
    check_payload(b"123", None)
    with pytest.raises(RefusedError, match="a payload of 3 bytes: the coordinator takes 2"):
        check_payload(b"123", 2)
