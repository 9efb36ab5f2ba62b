"""Manifests: written, read, and refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.digest import SIZE, Segment
from muster.checkpoint.manifest import FileEntry, Manifest, ManifestError, ManifestReference, RankEntry
from muster.checkpoint.version import LaterVersionError
from tests.support.saves.stored_checkpoints import ITEMS, ODD, entry_of, manifest_of

segments = st.builds(Segment, st.integers(1, 2**50), st.binary(min_size=SIZE, max_size=SIZE))
manifests = st.builds(
    Manifest,
    files=st.dictionaries(
        st.text(max_size=8),
        st.builds(
            FileEntry,
            st.lists(segments, max_size=4).map(tuple),
            st.none() | st.integers(0, 2**31),
        ),
        max_size=4,
    ),
    ranks=st.lists(
        st.builds(
            RankEntry,
            st.integers(0, 2**31),
            st.text(max_size=8),
            st.integers(0, 2**60),
            st.integers(0, 10**9).map(lambda count: count / 1000),
        ),
        max_size=3,
    ).map(tuple),
)
MANIFEST = manifest_of(ITEMS)


@given(manifests)
def test_manifest_is_read_as_it_was_written(manifest: Manifest):
    read = Manifest.decode(manifest.encode())
    assert read == manifest
    assert read.size == sum(one.size for one in manifest.files.values())


def test_changed_manifest_is_not_the_one_that_is_referred_to():
    data = MANIFEST.encode()
    reference = ManifestReference.of(data)
    assert reference.matches(data)
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        assert not reference.matches(bytes(changed))
        assert not reference.matches(data[:place])
    assert not reference.matches(data + b" ")


def test_changed_byte_is_a_manifest_error_or_is_read():
    """Nobody reads a changed one: its reference would not match. It must be no other error even so."""
    data = MANIFEST.encode()
    for place in range(len(data)):
        for value in (0, ord('"'), ord("9"), ord("-"), ord("e"), ord("]"), 255):
            changed = bytearray(data)
            changed[place] = value
            try:
                Manifest.decode(bytes(changed))
            except (ManifestError, LaterVersionError):
                continue


@given(st.binary() | st.sampled_from([json.dumps(value).encode() for value in ODD]))
def test_other_content_is_a_manifest_error(data: bytes):
    with pytest.raises(ManifestError):
        Manifest.decode(data)


def replaced(said: Any, path: list[str | int], value: Any) -> Any:
    inner = said
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return said


FIELDS: list[list[str | int]] = [
    ["format"],
    ["algorithm"],
    ["files"],
    ["files", "__0_0.distcp"],
    ["files", "__0_0.distcp", "size"],
    ["files", "__0_0.distcp", "digest"],
    ["files", "__0_0.distcp", "lengths"],
    ["files", "__0_0.distcp", "lengths", 0],
    ["files", "__0_0.distcp", "digests"],
    ["ranks"],
    ["ranks", 0],
    ["ranks", 0, "rank"],
    ["ranks", 0, "bytes"],
    ["ranks", 0, "seconds"],
]


@given(st.sampled_from(FIELDS), st.sampled_from(ODD))
def test_field_of_another_type_is_a_manifest_error(path: list[str | int], value: Any):
    data = json.dumps(replaced(json.loads(MANIFEST.encode()), path, value)).encode()
    try:
        read = Manifest.decode(data)
    except (ManifestError, LaterVersionError):
        return
    assert Manifest.decode(read.encode()) == read


@pytest.mark.parametrize("value", [-1, 2**63, 1.5, True, "6", None, float("inf"), float("nan")])
@pytest.mark.parametrize(
    "path", [path for path in FIELDS if path[-1] in (0, "rank", "bytes") and path != ["ranks", 0]]
)
def test_number_that_is_no_count_is_a_manifest_error(path: list[str | int], value: Any):
    data = json.dumps(replaced(json.loads(MANIFEST.encode()), path, value)).encode()
    with pytest.raises(ManifestError):
        Manifest.decode(data)


@pytest.mark.parametrize("value", [-1, float("inf"), float("nan"), "1", None, 10**400])
def test_seconds_that_are_no_duration_are_a_manifest_error(value: Any):
    data = json.dumps(replaced(json.loads(MANIFEST.encode()), ["ranks", 0, "seconds"], value)).encode()
    with pytest.raises(ManifestError):
        Manifest.decode(data)


@pytest.mark.parametrize(("field", "value"), [("format", 2), ("algorithm", "crc32")])
def test_other_format_says_what_to_use(field: str, value: Any):
    data = json.dumps(json.loads(MANIFEST.encode()) | {field: value}).encode()
    with pytest.raises(LaterVersionError, match="Use that version, or a later one"):
        Manifest.decode(data)


@pytest.mark.parametrize("items", [[b"a" * 3, b"b", b"c" * 4], [b"all of it"], []])
def test_segments_between_any_two_offsets(items: list[bytes]):
    entry = entry_of(items)
    data = b"".join(items)
    begins = [sum(map(len, items[:count])) for count in range(len(items) + 1)]
    for offset in range(len(data) + 3):
        assert entry.between(offset, 0) == ()
        for length in range(1, len(data) + 3):
            if offset in begins and offset + length in begins:
                found = entry.between(offset, length)
                assert found == entry_of(items[begins.index(offset) : begins.index(offset + length)]).segments
            else:
                with pytest.raises(ValueError, match=f"exactly {length} bytes from offset {offset} on"):
                    entry.between(offset, length)
