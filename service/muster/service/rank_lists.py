"""Lists of participants off the wire and from storage: the same bytes are the same list, decoded once.

Every rank of a subset group sends the whole list of its participants with its join. To decode a list takes
far longer than to find out that it is one of those that came before.
"""

from collections import OrderedDict
from collections.abc import Iterable

from muster.service.core.vocabulary.model import Ranks
from muster.v1 import session_pb2

MAX_RANKS = 65_536
"""In one list that is remembered, which is ``max_world_size``."""
MAX_RANKS_IN_ALL = 4 * MAX_RANKS
"""In all lists that are remembered: about 10 MiB."""
LIST_COST = 16
"""How many ranks take as much memory as a list does besides its ranks."""
MIN_BYTES = 1_024
"""Of a message, from which on it pays to look whether its list is known."""
MAX_BYTES = 4 * MAX_RANKS
"""Of a message with a list that may be remembered: a rank takes 3 bytes at most."""
MAX_FIELDS = 4
"""Of a ``JoinGroup``."""
_VARINT, _LENGTH_DELIMITED = 0, 2
"""Wire types of protobuf."""
_JOIN_GROUP = session_pb2.ConnectRequest.JOIN_GROUP_FIELD_NUMBER << 3 | _LENGTH_DELIMITED
_PARTICIPANTS = session_pb2.JoinGroup.PARTICIPANTS_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


class RankLists:
    """Decodes lists, and remembers those that were used last.

    Args:
        max_ranks: in all remembered lists, with ``LIST_COST`` for each list.
    """

    def __init__(self, max_ranks: int = MAX_RANKS_IN_ALL) -> None:
        self._max_ranks = max_ranks
        self._known: OrderedDict[bytes, Ranks] = OrderedDict()
        self._count = 0

    def shared(self, ranks: Iterable[int]) -> Ranks:
        """The list that joins with these participants share."""
        return self.decode(session_pb2.JoinGroup(participants=ranks).SerializeToString())

    def decode(self, participants: bytes) -> Ranks:
        """A list of participants.

        Args:
            participants: a ``JoinGroup`` that has nothing else, as bytes.

        Raises:
            DecodeError: they are none.
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
"""Of this process."""


def split_join(data: bytes) -> tuple[bytes, bytes] | None:
    """Part a large ``JoinGroup`` into its participants and all else, without decoding them.

    Args:
        data: a ``ConnectRequest``.

    Returns:
        Two ``JoinGroup`` messages, as bytes, which together are the one in ``data``. None: it is another
        message, or an unusual encoding, so protobuf must decode it.
    """
    if not MIN_BYTES <= len(data) <= MAX_BYTES or data[0] != _JOIN_GROUP:
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
    """A number, and where it ends.

    Raises:
        IndexError: there is none.
    """
    value = 0
    for shift in range(0, 64, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise IndexError(at)
