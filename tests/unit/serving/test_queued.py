"""A message in many outboxes is in memory once, and counts once."""

from muster.serving.budget import SMALL
from muster.serving.queued import Queued

LARGE = bytes(SMALL + 1)


def test_message_in_many_outboxes_counts_once():
    queued = Queued(most=2 * len(LARGE))
    for _ in range(3):
        queued.add(LARGE)
    assert (queued.bytes, queued.too_many) == (len(LARGE), False)
    others = [bytes(bytearray(LARGE)) for _ in range(2)]
    for other in others:
        queued.add(other)
    assert queued.too_many
    for data in (*others, LARGE, LARGE, LARGE):
        queued.remove(data)
    assert queued.bytes == 0
    assert not queued._users


def test_small_message_is_not_counted():
    queued = Queued()
    queued.add(bytes(SMALL))
    assert queued.bytes == 0
    queued.remove(bytes(SMALL))
