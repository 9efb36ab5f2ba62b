"""Decisions and errors as a worker sees them."""

import pickle

import pytest
from torch.distributed import DistStoreError

from muster.v1 import common_pb2 as pb
from muster.worker import errors
from muster.worker.decision import Decision, MissingRank, MissingState, Outcome, decision_from_pb

MISSING = MissingRank(3, "node-0", 4121, MissingState.CONNECTION_LOST, 41.0, 6)


def message(**more) -> pb.Decision:
    missing = pb.MissingRank(rank=3, host="node-0", pid=4121, state=3, gone_ms=41_000, last_sequence=6)
    fields = {"prefix": "p", "sequence": 7, "outcome": 2, "message": "m", "missing": [missing]}
    return pb.Decision(**(fields | more))


def test_a_decision_is_read_from_its_message():
    decision = decision_from_pb(message(payloads=[pb.Payload(rank=1, data=b"x")], last_arrival_rank=0))
    assert decision.outcome is Outcome.TIMED_OUT
    assert decision.missing == (MISSING,)
    assert decision.payloads == {1: b"x"}
    assert decision.last_arrival_rank == 0


def test_a_rank_that_never_joined_was_never_seen():
    decision = decision_from_pb(message(missing=[pb.MissingRank(rank=1, state=1)]))
    assert decision.missing[0].last_seen is None


def test_what_only_a_newer_coordinator_knows_is_no_release():
    decision = decision_from_pb(message(outcome=99, missing=[pb.MissingRank(rank=1, state=99)]))
    assert decision.outcome is Outcome.UNKNOWN
    assert type(errors.error_for(decision)) is errors.BarrierError


@pytest.mark.parametrize("outcome", [o for o in Outcome if o not in (Outcome.RELEASED, Outcome.UNKNOWN)])
def test_every_failure_is_a_store_error_with_its_fields(outcome: Outcome):
    error = errors.error_for(Decision("p", 7, outcome, "why", (MISSING,)))
    assert isinstance(error, DistStoreError)
    assert (error.prefix, error.sequence, error.outcome, error.missing) == ("p", 7, outcome, [MISSING])
    assert str(error) == "why"


@pytest.mark.parametrize(
    "error",
    [
        errors.BarrierTimeoutError("m", "p", 1, Outcome.TIMED_OUT, [MISSING]),
        errors.OutcomeUnknownError("m", "p", 1, Outcome.UNKNOWN),
        errors.RefusedError("m", "SUPERSEDED"),
        errors.ConnectError("m"),
    ],
)
def test_errors_survive_pickling(error: errors.MusterError):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
