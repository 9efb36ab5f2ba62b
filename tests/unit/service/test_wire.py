from enum import IntEnum

import pytest
from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper
from hypothesis import given
from hypothesis import strategies as st

from lab import records
from muster.service import wire
from muster.service.core.vocabulary.model import Decision, MemberState, MissingRank, MissingState, Outcome
from muster.service.core.vocabulary.records import CheckpointsRecord
from muster.v1 import common_pb2 as pb


def test_decision_comes_back_with_every_field():
    assert wire.decision_from_pb(wire.decision_to_pb(records.decision())) == records.decision()


@given(records.decisions)
def test_decision_that_is_read_and_written_again_stays_the_same(decision: Decision):
    """A coordinator that has started again tells late ranks what the others heard, to the byte."""
    once = wire.decision_to_pb(decision)
    assert wire.decision_to_pb(wire.decision_from_pb(once)) == once


@pytest.mark.parametrize("second", [0.9999999, 1.9999996, 1_700_000_000.999_999_9, 0.0, 1e-9])
def test_date_is_rounded_to_a_valid_one(second: float):
    decided_at = wire.decision_to_pb(records.decision(decided_at=second)).decided_at
    assert 0 <= decided_at.nanos < 1_000_000_000
    assert decided_at.seconds + decided_at.nanos / 1e9 == pytest.approx(second, abs=1e-6)


@given(records.missing_ranks)
def test_missing_rank_comes_back_to_the_millisecond(missing: MissingRank):
    back = wire.missing_from_pb(wire.missing_to_pb(missing))
    assert back.gone_for == pytest.approx(missing.gone_for, abs=0.000_6)
    assert wire.missing_to_pb(back) == wire.missing_to_pb(missing)


@given(records.checkpoints)
def test_checkpoint_and_failed_save_come_back_with_every_field(record: CheckpointsRecord):
    history = record.history
    if history.newest is not None:
        assert wire.checkpoint_from_pb(wire.checkpoint_to_pb(history.newest)) == history.newest
    for failed in history.failures:
        assert wire.failed_save_from_pb(wire.failed_save_to_pb(failed)) == failed


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (Outcome, pb.Outcome, "OUTCOME_"),
        (MissingState, pb.MissingState, "MISSING_STATE_"),
        (MemberState, pb.MemberState, "MEMBER_STATE_"),
    ],
)
def test_numbers_of_the_core_are_those_of_the_wire(ours: type[IntEnum], theirs: EnumTypeWrapper, prefix: str):
    expected = {name.removeprefix(prefix): number for name, number in theirs.items()}
    assert expected.pop("UNSPECIFIED") == 0
    assert {one.name: one.value for one in ours} == expected


@pytest.mark.parametrize("field", [b"\x28\x63", b"\x28\x00", b""], ids=["future", "zero", "unset"])
def test_unknown_outcome_is_an_error(field: bytes):
    with pytest.raises(ValueError, match="is not a valid Outcome"):
        wire.decision_from_pb(pb.Decision.FromString(field))


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.0, 0), (1.2344, 1234), (1.2346, 1235), (-5.0, 0), (1e6, 10**9)]
)
def test_durations_are_rounded_and_never_negative(seconds: float, expected: int):
    assert wire.milliseconds(seconds) == expected


@given(st.integers(0, 10**12))
def test_milliseconds_survive(number: int):
    assert wire.milliseconds(number / 1000) == number
