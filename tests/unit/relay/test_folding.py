"""A fold keeps each field of the messages that it folds, also one that is added later."""

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from muster.relay.folding import Fold
from muster.relay.stats import RelayStats
from muster.v1 import session_pb2 as pb

MAX_PAYLOAD = 1_000


def fields(message: type[Message], *, but: str) -> list[str]:
    """The names of its fields, except for the one that is folded."""
    return [field.name for field in message.DESCRIPTOR.fields if field.name != but]


def changed(message: Message, name: str) -> None:
    """Give a field another value than its default."""
    field = message.DESCRIPTOR.fields_by_name[name]
    value = "other" if field.type == FieldDescriptor.TYPE_STRING else 7
    if field.is_repeated:
        getattr(message, name).append(value)
    else:
        setattr(message, name, value)


@pytest.mark.parametrize("name", fields(pb.Arrive, but="arrivals"))
def test_arrivals_that_differ_in_a_field_are_two_messages(name: str):
    fold, plain, other = Fold(RelayStats()), pb.Arrive(), pb.Arrive()
    changed(other, name)
    fold.arrive(plain, [pb.Arrival(rank=0)])
    fold.arrive(other, [pb.Arrival(rank=1)])
    sent = [request.arrive for request in fold.take(MAX_PAYLOAD)]
    assert [[one.rank for one in arrive.arrivals] for arrive in sent] == [[0], [1]]
    del sent[1].arrivals[:]
    assert sent[1] == other


@pytest.mark.parametrize("name", fields(pb.JoinGroup, but="ranks"))
def test_joins_that_differ_in_a_field_are_two_messages(name: str):
    fold, plain, other = Fold(RelayStats()), pb.JoinGroup(), pb.JoinGroup()
    changed(other, name)
    fold.join([0], plain)
    fold.join([1], other)
    sent = [request.join_group for request in fold.take(MAX_PAYLOAD)]
    assert [list(group.ranks) for group in sent] == [[0], [1]]
    del sent[1].ranks[:]
    assert sent[1] == other


def test_equal_messages_of_several_ranks_are_one():
    fold = Fold(RelayStats())
    for rank in (0, 1):
        fold.arrive(pb.Arrive(prefix="checkpoint"), [pb.Arrival(rank=rank)])
    (request,) = fold.take(MAX_PAYLOAD)
    assert [one.rank for one in request.arrive.arrivals] == [0, 1]
