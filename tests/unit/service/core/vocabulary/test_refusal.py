"""Invariant 16 (every refusal carries a reason)."""

import gc
import sys

import pytest

from muster.service.core.vocabulary.effects import Effects, Entry, Refused
from muster.service.core.vocabulary.events import Arrival, Arrive
from muster.service.core.vocabulary.refusal import Reason, Refusal, limit_exceeded
from tests.support.expect import some
from tests.support.world.core_client import CKPT, TIMEOUT
from tests.support.world.core_world import World


def test_reasons_are_stable():
    assert [reason.name for reason in Reason] == [
        "INVALID_ARGUMENT",
        "HELLO_REQUIRED",
        "HELLO_REPEATED",
        "PROTOCOL_VERSION",
        "NOT_JOINED",
        "NOT_A_PARTICIPANT",
        "RANK_NOT_IN_SESSION",
        "STALE_GENERATION",
        "SUPERSEDED",
        "SHAPE_CHANGED",
        "SEQUENCE_AHEAD",
        "SEQUENCE_BEHIND",
        "SEQUENCE_FORGOTTEN",
        "LIMIT_EXCEEDED",
        "RUN_NOT_FOUND",
        "BARRIER_NOT_FOUND",
        "NO_OPEN_BARRIER",
        "SESSION_REPLACED",
        "RUN_CLOSED",
        "RUN_STOPPED",
        "RUN_FORGOTTEN",
        "RUN_IN_USE",
        "RENDEZVOUS_TIMED_OUT",
        "NODE_REMOVED",
        "NODE_NOT_NEEDED",
        "NODE_EVICTED",
        "NODE_NOT_FOUND",
        "NO_SPARE",
        "SETTINGS_DIFFER",
        "EVICTED",
        "MEMBER_NOT_FOUND",
        "NO_MEMBERS",
        "RANKS_RECONNECT",
        "NO_SAVE_ASKED",
        "COORDINATOR_DRAINING",
        "NOT_LEADER",
        "SLOW_CONSUMER",
        "STORE_TIMED_OUT",
        "NOT_A_NUMBER",
        "STALE_OPERATION",
        "ATTEMPT_SUPERSEDED",
        "RECOVERY_SUPERSEDED",
        "RECOVERY_MISMATCHED",
        "KEEPER_NOT_CONNECTED",
        "TOKEN_MISSING",
        "TOKEN_UNKNOWN",
        "TOKEN_EXPIRED",
        "KEYS_UNAVAILABLE",
        "ROLE_TOO_LOW",
        "RUN_NOT_ALLOWED",
        "NODE_NOT_ALLOWED",
    ]


def test_refusal_carries_its_details_as_text_for_programs():
    refusal = Refusal(Reason.SEQUENCE_AHEAD, "too far", next_sequence=7)
    assert str(refusal) == refusal.message == "too far"
    assert refusal.metadata == {"next_sequence": "7"}


def test_limit_refusal_names_demand_limit_and_next_step():
    refusal = limit_exceeded("max_runs", 1_000, "1,000 runs are known already")
    assert refusal.reason is Reason.LIMIT_EXCEEDED
    assert refusal.message == (
        "1,000 runs are known already; the limit max_runs is 1,000. "
        "Lower the demand, or raise max_runs on the coordinator."
    )
    assert refusal.metadata == {"limit": "max_runs", "value": "1000"}


def test_special_limit_refusal_has_its_own_next_step():
    refusal = limit_exceeded("max_watches", 5, "5 watches are open", "End one of them.")
    assert refusal.message == "5 watches are open; the limit max_watches is 5. End one of them."


@pytest.mark.parametrize("keep", [Refused, lambda refusal: Entry(refusal=refusal)])
def test_kept_refusal_drops_the_refused_message(keep):
    """It came through frames that hold the request: a large payload would stay until a full collection."""

    def refuse() -> None:
        try:
            raise KeyError
        except KeyError:
            raise Refusal(Reason.NOT_JOINED, "not joined") from None

    try:
        refuse()
    except Refusal as refusal:
        kept = keep(refusal).refusal
    assert (kept.__traceback__, kept.__context__) == (None, None)


def test_refused_arrival_is_held_by_nothing():
    """What holds it until a full collection is a cycle, and would count as a reference."""
    world = World()
    zero, _ = world.ranks()
    ahead = Arrive(some(zero.session), CKPT, 7, TIMEOUT, (Arrival(0),))
    gc.disable()
    try:
        before = sys.getrefcount(ahead)
        world.coordinator.step(ahead, world.instant, Effects())
        assert sys.getrefcount(ahead) == before
    finally:
        gc.enable()
