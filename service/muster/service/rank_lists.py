"""Lists of participants from the wire and from storage: equal bytes are decoded once, to one shared list.

Every rank of a subset group sends the whole list of participants with its join. Decoding a list takes far
longer than finding out that the same list came before.
"""

from collections import OrderedDict
from collections.abc import Iterable

from muster.service.core.vocabulary.model import Ranks
from muster.v1 import session_pb2

MAX_RANKS = 65_536
"""Ranks of one cached list: ``max_world_size``."""
MAX_RANKS_IN_ALL = 4 * MAX_RANKS
"""Ranks of all cached lists together: about 10 MiB."""
LIST_COST = 16
"""The memory of a list without its ranks, as a number of ranks."""
MIN_BYTES = 1_024
"""Size of a message from which on a lookup of its list is faster than decoding it."""
MAX_BYTES = 4 * MAX_RANKS
"""Size limit of a message whose list may be cached: a rank takes at most 3 bytes."""
MAX_FIELDS = 4
"""Number of fields of a ``JoinGroup``."""
_VARINT, _LENGTH_DELIMITED = 0, 2
"""Wire types of protobuf."""
JOIN_GROUP = bytes((session_pb2.ConnectRequest.JOIN_GROUP_FIELD_NUMBER << 3 | _LENGTH_DELIMITED,))
"""The first byte of a ``ConnectRequest`` with a ``JoinGroup``."""
_PARTICIPANTS = session_pb2.JoinGroup.PARTICIPANTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


class RankLists:
    """Decodes lists, and caches the most recently used ones.

    Args:
        max_ranks: limit of the ranks in all cached lists, plus ``LIST_COST`` for each list.
    """

    def __init__(self, max_ranks: int = MAX_RANKS_IN_ALL) -> None:
        self._max_ranks = max_ranks
        self._known: OrderedDict[bytes, Ranks] = OrderedDict()
        self._count = 0

    def shared(self, ranks: Iterable[int]) -> Ranks:
        """Return the list that all joins with these participants share."""
        return self.decode(session_pb2.JoinGroup(participants=ranks).SerializeToString())

    def decode(self, participants: bytes) -> Ranks:
        """Decode a list of participants.

        Args:
            participants: the bytes of a ``JoinGroup`` without other fields.

        Raises:
            DecodeError: the bytes are not such a message.
        """
        known = self._known.get(participants)
        if known is None:
            known = Ranks(session_pb2.JoinGroup.FromString(participants).participants)
            self._remember(participants, known)
        else:
            self._known.move_to_end(participants)
        return known

    def _remember(self, participants: bytes, ranks: Ranks) -> None:
        if len(ranks) > MAX_RANKS:
            return
        self._known[participants] = ranks
        self._count += LIST_COST + len(ranks)
        while self._count > self._max_ranks:
            _, oldest = self._known.popitem(last=False)
            self._count -= LIST_COST + len(oldest)


RANK_LISTS = RankLists()
"""The cache of this process."""


def split_join(data: bytes) -> tuple[bytes, bytes] | None:
    """Split a large ``JoinGroup`` into its participants and the other fields, without decoding them.

    Args:
        data: a ``ConnectRequest``.

    Returns:
        The bytes of two ``JoinGroup`` messages that together are the one in ``data``. None: it is another
        message, or has an unusual encoding, so that protobuf must decode it.
    """
    if not MIN_BYTES <= len(data) <= MAX_BYTES or data[:1] != JOIN_GROUP:
        return None
    try:
        length, begin = _varint(data, 1)
        if begin + length != len(data):
            return None
        at = begin
        for _ in range(MAX_FIELDS):
            tag, value = _varint(data, at)
            size, after = _varint(data, value)
            end = after + size if tag & 7 == _LENGTH_DELIMITED else after
            if tag & 7 not in (_VARINT, _LENGTH_DELIMITED) or end > len(data):
                return None
            if tag == _PARTICIPANTS:
                return data[at:end], data[begin:at] + data[end:]
            at = end
    except IndexError:
        pass
    return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Decode a number, and return it with the position behind it.

    Raises:
        IndexError: the data ends within the number.
    """
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError(at)
