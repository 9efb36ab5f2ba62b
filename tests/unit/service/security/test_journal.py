"""Refusals in the log: each with its words, and no more than a log bears."""

from structlog.testing import capture_logs

from muster.service.core.vocabulary.refusal import Reason
from muster.service.security.journal import MAX_LINES, WINDOW, Journal


def test_refusal_is_logged_with_what_failed():
    with capture_logs() as logged:
        Journal().refused(Reason.TOKEN_UNKNOWN, "aud", "for another audience", issuer="cluster")
    assert logged == [
        {
            "event": "token.refused",
            "log_level": "warning",
            "reason": "TOKEN_UNKNOWN",
            "check": "aud",
            "message": "for another audience",
            "issuer": "cluster",
        }
    ]


def test_call_that_ends_with_its_token_is_no_warning():
    with capture_logs() as logged:
        Journal().ended(Reason.TOKEN_EXPIRED, "exp", "expired")
    assert [(line["event"], line["log_level"], line["check"]) for line in logged] == [
        ("token.ended", "info", "exp")
    ]


def test_flood_is_counted_and_hides_no_other_check():
    now = 0.0
    journal = Journal(lambda: now)
    with capture_logs() as logged:
        for _ in range(MAX_LINES + 5):
            journal.refused(Reason.TOKEN_UNKNOWN, "shape", "no JWT")
        assert len(logged) == MAX_LINES
        journal.refused(Reason.TOKEN_EXPIRED, "exp", "expired")
        assert logged.pop()["check"] == "exp"
        now = WINDOW
        journal.refused(Reason.TOKEN_UNKNOWN, "shape", "no JWT")
        journal.refused(Reason.TOKEN_UNKNOWN, "shape", "no JWT")
    assert [line.get("left_out") for line in logged[MAX_LINES:]] == [5, None]
