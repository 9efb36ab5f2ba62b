import pytest

from muster.v1 import common_pb2 as pb
from muster.worker.decision import (
    Decision,
    Failure,
    MissingRank,
    MissingState,
    Outcome,
    decision_from_pb,
    missing_from_pb,
)
from muster.worker.errors import BarrierError, error_for

MISSING = pb.MissingRank(
    rank=3, host="node-0", pid=4121, state=pb.MISSING_STATE_CONNECTION_LOST, gone_ms=41_500, last_sequence=6
)


def test_decision_is_read_completely_from_its_message():
    message = pb.Decision(
        run_id="job1",
        prefix="checkpoint",
        sequence=7,
        generation=2,
        outcome=pb.OUTCOME_TIMED_OUT,
        message="timed out",
        missing=[MISSING],
        failures=[pb.Failure(rank=1, host="node-1", pid=4122, reason="no space left")],
        arrived=14,
        required=16,
        payloads=[pb.Payload(rank=0, data=b"zero"), pb.Payload(rank=2, data=b"")],
        wait_ms=12_500,
        skew_ms=250,
        last_arrival_rank=0,
    )
    assert decision_from_pb(message) == Decision(
        prefix="checkpoint",
        sequence=7,
        outcome=Outcome.TIMED_OUT,
        message="timed out",
        missing=(MissingRank(3, "node-0", 4121, MissingState.CONNECTION_LOST, 41.5, 6),),
        failures=(Failure(1, "node-1", 4122, "no space left"),),
        payloads={0: b"zero", 2: b""},
        wait=12.5,
        skew=0.25,
        last_arrival_rank=0,
    )


def test_absent_fields_of_a_decision_have_neutral_values():
    bare = decision_from_pb(pb.Decision(prefix="p", outcome=pb.OUTCOME_RELEASED))
    assert bare == Decision("p", 0, Outcome.RELEASED, "")
    assert bare.last_arrival_rank is None


def test_outcome_has_a_member_for_each_value_of_the_protocol():
    names = {name.removeprefix("OUTCOME_") for name, _ in pb.Outcome.items()} - {"UNSPECIFIED"}
    assert names | {"UNKNOWN"} == {outcome.value for outcome in Outcome} == set(Outcome.__members__)
    for name in names:
        message = pb.Decision(outcome=pb.Outcome.Value(f"OUTCOME_{name}"))
        assert decision_from_pb(message).outcome.name == name


def test_missing_state_has_a_member_for_each_value_of_the_protocol():
    names = {name.removeprefix("MISSING_STATE_") for name, _ in pb.MissingState.items()} - {"UNSPECIFIED"}
    assert names == {state.value for state in MissingState} == set(MissingState.__members__)


@pytest.mark.parametrize("number", [0, 99])
def test_unknown_outcome_of_a_newer_coordinator_is_no_release(number: int):
    missing = pb.MissingRank(rank=1, state=number)  # type: ignore[arg-type]
    message = pb.Decision(outcome=number, missing=[missing])  # type: ignore[arg-type]
    decision = decision_from_pb(message)
    assert decision.outcome is Outcome.UNKNOWN
    assert decision.missing[0].state is MissingState.NOT_ARRIVED
    assert type(error_for(decision)) is BarrierError


@pytest.mark.parametrize(
    ("state", "last_seen"),
    [
        (pb.MISSING_STATE_NEVER_JOINED, None),
        (pb.MISSING_STATE_NOT_ARRIVED, 0.0),
        (pb.MISSING_STATE_CONNECTION_LOST, 0.0),
        (pb.MISSING_STATE_LEFT, 0.0),
    ],
)
def test_rank_that_never_joined_has_no_last_seen(state: pb.MissingState.ValueType, last_seen: float | None):
    assert missing_from_pb(pb.MissingRank(state=state)).last_seen == last_seen


def test_last_sequence_0_differs_from_none():
    state = pb.MISSING_STATE_NOT_ARRIVED
    assert missing_from_pb(pb.MissingRank(state=state, last_sequence=0)).last_sequence == 0
    assert missing_from_pb(pb.MissingRank(state=state)).last_sequence is None
