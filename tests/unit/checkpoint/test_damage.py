"""The record of damage: written, read, and read although it is garbage."""

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.damage import DAMAGED, CorruptCheckpointError, Damage, DamageError
from tests.support.saves.stored_checkpoints import ODD

damages = st.builds(
    Damage,
    file=st.text(max_size=8),
    reason=st.text(max_size=8),
    offset=st.none() | st.integers(0, 2**63),
    rank=st.none() | st.integers(0, 2**31),
    host=st.text(max_size=8),
    found_at=st.floats(0, 1e12),
)


@given(damages)
def test_damage_is_read_as_it_was_written(damage: Damage):
    assert Damage.decode(damage.encode()) == damage


@given(st.binary() | st.sampled_from([json.dumps(value).encode() for value in ODD]))
def test_mark_that_is_garbage_still_marks_damage(data: bytes):
    read = Damage.decode(data)
    assert str(read)


@given(st.sampled_from(["file", "reason", "offset", "rank", "host", "found_at"]), st.sampled_from(ODD))
def test_field_of_another_type_still_marks_damage(field: str, value: Any):
    said = json.loads(Damage("a", "b").encode()) | {field: value}
    read = Damage.decode(json.dumps(said).encode())
    assert str(read)
    assert type(read.file) is type(read.reason) is type(read.host) is str
    assert isinstance(read.found_at, float | int)
    assert read.offset is None or type(read.offset) is int


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff", b"{}", b"null"])
def test_unreadable_mark_says_so(data: bytes):
    read = Damage.decode(data)
    assert (read.file, "cannot be read" in read.reason) == (DAMAGED, True)


def test_field_of_a_later_version_is_passed_over():
    said = json.loads(Damage("a", "b").encode()) | {"more": 1}
    assert Damage.decode(json.dumps(said).encode()) == Damage("a", "b")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Damage("a.distcp", "it is missing"), "a.distcp: it is missing"),
        (Damage("a.distcp", "it ends", 4096), "a.distcp at offset 4096: it ends"),
        (Damage("a", "it ends", 0, 3, "node-1"), "a at offset 0: it ends (found by rank 3 on node-1)"),
        (Damage("", "a bad disk"), "a bad disk"),
    ],
)
def test_damage_is_told_in_one_line(damage: Damage, words: str):
    assert str(damage) == words


def test_errors_travel_between_processes():
    damage = Damage("a", "b", 3)
    copied = pickle.loads(pickle.dumps(DamageError(damage)))
    assert (copied.damage, str(copied)) == (damage, "a at offset 3: b")
    corrupt = pickle.loads(pickle.dumps(CorruptCheckpointError("none is left", (damage,))))
    assert (corrupt.damages, str(corrupt)) == ((damage,), "none is left")
