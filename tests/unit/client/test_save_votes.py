"""The payloads by which ranks agree on a save: what one side writes, the other reads."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.client.protocol import MAX_STEP
from muster.client.save_votes import Phase, SaveVote, parse_vote

numbers = st.integers(0, MAX_STEP)


@given(phase=st.sampled_from(Phase), step=numbers, number=numbers, stop=st.booleans())
def test_vote_is_read_as_it_was_written(phase: Phase, step: int, number: int, stop: bool):
    vote = SaveVote(phase, step, number, stop)
    assert parse_vote(vote.encode()) == vote


def test_payload_on_the_wire():
    assert SaveVote(Phase.AGREE, 12, 3, stop=True).encode() == b"agree 12 3 1"


@pytest.mark.parametrize(
    "payload",
    [
        *(b"", b"agree", b"agree 1 1", b"agree x 1 0", b"leave 1 1 0", b"\xff 1 1 0", b"agree 1 1 0 0"),
        *(
            b"agree -1 1 0",
            b"agree 1 -1 0",
            f"done {MAX_STEP + 1} 1 0".encode(),
            b"agree " + b"9" * 5_000 + b" 1 0",
        ),
    ],
)
def test_malformed_payload_is_no_vote(payload: bytes):
    assert parse_vote(payload) is None


@given(st.binary(max_size=64))
def test_any_bytes_are_a_vote_or_none(payload: bytes):
    vote = parse_vote(payload)
    assert vote is None or 0 <= vote.step <= MAX_STEP
