"""Segments and their digests, however the bytes come."""

import array

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.digest import SIZE, Segment, SegmentDigester, digest_of, file_digest


@given(st.lists(st.lists(st.binary(max_size=40), max_size=5), max_size=5))
def test_segments_do_not_depend_on_how_bytes_come(items: list[list[bytes]]):
    digester = SegmentDigester()
    for pieces in items:
        for piece in pieces:
            digester.update(piece)
        digester.cut()
    joined = [b"".join(pieces) for pieces in items]
    segments = digester.segments()
    assert segments == tuple(Segment(len(item), digest_of(item)) for item in joined if item)
    assert digester.size == sum(map(len, joined))
    assert digester.segments() == segments, "it ends once"


def test_empty_segment_is_left_out():
    digester = SegmentDigester()
    digester.cut()
    digester.update(b"")
    digester.cut()
    assert digester.segments() == ()


def test_views_count_their_bytes_and_not_their_elements():
    numbers = array.array("d", [1.5, 2.5])
    digester = SegmentDigester()
    digester.update(memoryview(numbers))
    assert digester.segments() == (Segment(16, digest_of(numbers.tobytes())),)


@given(st.binary())
def test_digest_is_xxh3_128(data: bytes):
    assert digest_of(data) == xxhash.xxh3_128(data).digest()
    assert len(digest_of(data)) == SIZE


def test_digest_of_a_file_depends_on_the_order_of_its_segments():
    one, two = (Segment(1, digest_of(data)) for data in (b"a", b"b"))
    assert file_digest([one, two]) == digest_of(digest_of(b"a") + digest_of(b"b"))
    assert file_digest([one, two]) != file_digest([two, one])
