from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from muster.service.core.vocabulary.events import JoinGroup
from muster.service.core.vocabulary.model import Ranks
from muster.service.rank_lists import LIST_COST, MAX_BYTES, MIN_BYTES, RankLists, split_join
from muster.service.rpc.codec import parse_session_message
from muster.v1 import session_pb2
from tests.support.expect import of_kind

HALF = range(0, 4_096, 2)


def a_join(participants: object = HALF, **more: object) -> bytes:
    join = session_pb2.JoinGroup(prefix="eval", world_size=4_096, participants=participants, **more)  # type: ignore[arg-type]
    return session_pb2.ConnectRequest(join_group=join).SerializeToString()


def parse(data: bytes) -> JoinGroup:
    return of_kind(JoinGroup, parse_session_message(1, data))


def nested(fields: bytes) -> bytes:
    """A ConnectRequest whose JoinGroup has these fields."""
    size = len(fields)
    assert 128 <= size < 16_384, "its length takes two bytes"
    return bytes([0x12, size & 127 | 128, size >> 7]) + fields


def test_joins_of_many_ranks_share_one_list_of_participants():
    one, other = (parse(a_join(ranks=[rank])) for rank in (0, 2))
    assert one.participants is other.participants
    assert (one.ranks, other.ranks) == ((0,), (2,))
    assert one == JoinGroup(1, "eval", 4_096, tuple(HALF), (0,))


def test_list_from_storage_is_the_one_of_the_joins():
    lists = RankLists()
    (participants, _) = split_join(a_join()) or (b"", b"")
    assert lists.shared(HALF) is lists.decode(participants) == Ranks(HALF)


def test_list_that_was_not_used_for_longest_is_forgotten():
    lists = RankLists(max_ranks=2 * (LIST_COST + 2))
    first, second = lists.shared((0, 1)), lists.shared((2, 3))
    assert lists.shared((0, 1)) is first
    lists.shared((4, 5))
    assert lists.shared((0, 1)) is first
    assert lists.shared((2, 3)) is not second


def test_short_lists_are_bounded_by_their_number():
    lists = RankLists(max_ranks=10 * (LIST_COST + 1))
    first = lists.shared((0,))
    for rank in range(1, 10):
        lists.shared((rank,))
    assert lists.shared((0,)) is first
    for rank in range(10, 20):
        lists.shared((rank,))
    assert lists.shared((0,)) is not first


def test_small_join_is_left_to_protobuf():
    data = a_join(range(8))
    assert len(data) < MIN_BYTES
    assert split_join(data) is None
    assert parse(data).participants == tuple(range(8))


def test_join_with_its_participants_in_two_pieces_has_them_all():
    pieces = [session_pb2.JoinGroup(participants=half).SerializeToString() for half in (HALF, (1, 3))]
    data = nested(b"".join(pieces))
    assert len(data) >= MIN_BYTES
    assert parse(data).participants == (*HALF, 1, 3)


def test_join_with_unpacked_participants_has_them_all():
    """Encoders may write every rank as a field of its own."""
    unpacked = b"".join(bytes([0x18, rank]) for rank in range(100)) * 6
    data = nested(unpacked)
    assert len(data) >= MIN_BYTES
    assert parse(data).participants == tuple(range(100)) * 6


def test_message_beyond_any_list_is_left_to_protobuf():
    assert split_join(a_join([2**31 - 1] * (MAX_BYTES // 5 + 1))) is None


@given(data=st.binary(max_size=200).map(lambda some: some.ljust(MIN_BYTES, b"\0")), at=st.integers(0, 40))
def test_any_bytes_are_split_as_protobuf_reads_them_or_not_at_all(data: bytes, at: int):
    whole = a_join(ranks=[4])
    message = whole[:at] + data[:at] + whole[2 * at :]
    parts = split_join(message)
    if parts is not None:
        assert join_of(nested(parts[1] + parts[0])) == join_of(message)


def join_of(message: bytes) -> session_pb2.JoinGroup | None:
    """None: it cannot be decoded."""
    try:
        return session_pb2.ConnectRequest.FromString(message).join_group
    except DecodeError:
        return None
