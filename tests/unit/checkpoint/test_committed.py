"""Markers: sealed, read strictly, those of 0.1.0 and of frameworks' adapters among them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.committed import (
    NO_STEP,
    Committed,
    committed_by_adapter,
    committed_from,
    seal,
    step_in,
    unseal,
)
from muster.checkpoint.manifest import ManifestReference
from tests.support.saves.stored_checkpoints import ODD

PATH = Path("/job1/step-0000000100")
MADE = Committed(100, 2, "job1", "save", 7, PATH, 3, 1_700_000_000.25, ManifestReference(4096, "ab" * 16))
ADAPTERS = {"run_id": "job1", "generation": 1, "world_size": 2, "prefix": "checkpoint/dcp", "sequence": 4}

checkpoints = st.builds(
    Committed,
    step=st.integers(0, 2**63),
    world_size=st.integers(0, 2**31),
    run_id=st.text(max_size=8),
    prefix=st.text(max_size=8),
    sequence=st.integers(0, 2**63),
    path=st.just(PATH),
    order=st.integers(0, 2**63),
    committed_at=st.floats(0, 1e12),
    manifest=st.none() | st.builds(ManifestReference, st.integers(0, 2**63), st.text(max_size=8)),
)


@given(checkpoints)
def test_marker_is_read_as_it_was_sealed(made: Committed):
    assert committed_from(unseal(seal(made.fields())), PATH) == made


def test_flipped_bit_of_a_sealed_marker_is_found_or_changes_nothing():
    sealed = seal(MADE.fields())
    for place in range(len(sealed)):
        for bit in range(8):
            flipped = bytearray(sealed)
            flipped[place] ^= 1 << bit
            try:
                read = committed_from(unseal(bytes(flipped)), PATH)
            except ValueError:
                continue
            assert read == MADE, bytes(flipped)


@given(st.data())
def test_changed_byte_of_a_sealed_marker_is_found_or_changes_nothing(data: st.DataObject):
    made = data.draw(checkpoints)
    changed = bytearray(seal(made.fields()))
    changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        read = committed_from(unseal(bytes(changed)), PATH)
    except ValueError:
        return
    assert read == made


def test_truncated_or_extended_marker_is_found():
    sealed = seal(MADE.fields())
    for length in range(len(sealed)):
        with pytest.raises(ValueError):
            unseal(sealed[:length])
    for more in (b"x", b"{}", b"\0", sealed):
        with pytest.raises(ValueError):
            unseal(sealed + more)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"7", b"null", b'"digest"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000]
)
def test_marker_that_is_no_object_is_refused(data: bytes):
    with pytest.raises(ValueError):
        unseal(data)


def test_marker_that_names_a_manifest_cannot_lose_its_digest():
    said = json.loads(seal(MADE.fields()))
    del said["digest"]
    with pytest.raises(ValueError, match="lost its digest"):
        unseal(json.dumps(said).encode())


def test_marker_of_0_1_0_is_read_and_names_no_manifest():
    said = {"step": 100, "world_size": 2, "run_id": "job1", "prefix": "save", "sequence": 7}
    made = committed_from(unseal(json.dumps(said).encode()), PATH)
    assert made == Committed(100, 2, "job1", "save", 7, PATH)
    assert (made.manifest, made.order, made.committed_at) == (None, 0, 0.0)


@given(st.dictionaries(st.sampled_from(sorted(MADE.fields())), st.sampled_from(ODD)))
def test_field_of_another_type_is_refused(changes: dict[str, Any]):
    try:
        made = committed_from(MADE.fields() | changes, PATH)
    except ValueError:
        return
    assert type(made.step) is type(made.world_size) is type(made.sequence) is type(made.order) is int
    assert type(made.run_id) is type(made.prefix) is str
    assert made.manifest is None or type(made.manifest) is ManifestReference


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 7, "now"])
def test_time_that_is_none_is_refused(seconds: Any):
    with pytest.raises(ValueError, match="committed_at"):
        committed_from(MADE.fields() | {"committed_at": seconds}, PATH)


def test_age_is_the_order_of_commits_and_then_the_step():
    later = replace(MADE, step=60, order=4)
    old = replace(MADE, step=50, order=0)
    assert sorted([MADE, later, old], key=lambda made: made.age_order) == [old, MADE, later]


# ---------------------------------------------------------------------- of a framework's adapter


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("global_step100", 100),
        ("checkpoint_7", 7),
        ("step-0000000100", 100),
        ("epoch=1-step=300.ckpt", 300),
        ("final", NO_STEP),
        ("2026-run-a", NO_STEP),
        ("", NO_STEP),
    ],
)
def test_step_is_the_number_at_the_end_of_a_name(name: str, step: int):
    assert step_in(name) == step


def test_marker_of_an_adapter_has_its_step_in_the_name():
    made = committed_by_adapter(unseal(seal(ADAPTERS)), Path("/out/checkpoint-500"))
    assert (made.step, made.world_size, made.run_id, made.prefix, made.sequence) == (
        500, 2, "job1", "checkpoint/dcp", 4,
    )  # fmt: skip
    assert made.manifest is None


def test_marker_of_an_adapter_names_its_manifest():
    said = ADAPTERS | {"manifest": {"size": 3, "digest": "ab"}}
    assert committed_by_adapter(said, PATH).manifest == ManifestReference(3, "ab")


@pytest.mark.parametrize("lost", ["run_id", "world_size", "prefix", "sequence"])
def test_marker_of_an_adapter_without_a_field_is_refused(lost: str):
    with pytest.raises(ValueError):
        committed_by_adapter({name: value for name, value in ADAPTERS.items() if name != lost}, PATH)
