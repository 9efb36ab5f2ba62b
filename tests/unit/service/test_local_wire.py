"""Each field of a local checkpoint's message arrives, under its own name, on both ways."""

import enum
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import count
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from muster.service import local_wire
from muster.service.core.local.views import LocalTierView
from muster.service.core.vocabulary.local import (
    LocalCommitted,
    Orders,
    Peers,
    Permitted,
    Recovered,
)
from muster.v1 import local_pb2 as pb

SESSION = 900
SECRET = "a new secret"

READERS: dict[str, Callable[[Any], object]] = {
    "Keep": lambda message: local_wire.keep_from_pb(SESSION, message, SECRET),
    "Report": partial(local_wire.report_from_pb, SESSION),
    "Commit": partial(local_wire.commit_from_pb, SESSION),
    "Permit": partial(local_wire.permit_from_pb, SESSION),
    "Recover": partial(local_wire.recover_from_pb, SESSION),
}
WRITERS: dict[type, Callable[[Any], Message]] = {
    Peers: lambda value: local_wire.keep_response(value).peers,
    Orders: lambda value: local_wire.keep_response(value).orders,
    LocalCommitted: local_wire.committed_to_pb,
    Permitted: local_wire.permitted_to_pb,
    Recovered: local_wire.recovered_to_pb,
    LocalTierView: local_wire.list_response,
}
WITHOUT_EVENT = {"List"}
"""The servicer reads the run of this request itself."""
RENAMED = {
    "muster.v1.Keeper.failure_domain": "domain",
    "muster.v1.KeeperView.keeper": "info",
    "muster.v1.LocalCheckpointView.age_seconds": "age",
    "muster.v1.Transfer.elapsed_ms": "seconds",
}
"""Fields whose names differ in the core."""
NOT_IN_THE_EVENT = {"muster.v1.KeepRequest.protocol_version"}
"""The servicer checks it."""
NOT_IN_THE_MESSAGE = {"session", "new_token"}
"""The servicer adds them."""

METHODS: dict[str, Any] = dict(pb.DESCRIPTOR.services_by_name["LocalCheckpointService"].methods_by_name)


def filled(message: Message, numbers: "count[int]") -> Message:
    """Set each field of a message to a value that no other field has; a repeated field gets two."""
    for field in message.DESCRIPTOR.fields:
        if field.is_repeated:
            for _ in range(2):
                if field.message_type is not None:
                    filled(getattr(message, field.name).add(), numbers)
                else:
                    getattr(message, field.name).append(_scalar(field, next(numbers)))
        elif field.message_type is not None:
            filled(getattr(message, field.name), numbers)
        else:
            setattr(message, field.name, _scalar(field, next(numbers)))
    return message


def _scalar(field: Any, number: int) -> object:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    if field.type == FieldDescriptor.TYPE_BYTES:
        return str(number).encode()
    if field.type == FieldDescriptor.TYPE_STRING:
        return str(number)
    return True if field.type == FieldDescriptor.TYPE_BOOL else number


def built(kind: Any, numbers: "count[int]") -> Any:
    """Make a value of a type, each part of which differs from all others."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (tuple, frozenset):
        return origin(built(arguments[0], numbers) for _ in range(2))
    if origin is types.UnionType:
        return built(next(one for one in arguments if one is not types.NoneType), numbers)
    if is_dataclass(kind) or hasattr(kind, "_fields"):
        return kind(**{name: built(hint, numbers) for name, hint in get_type_hints(kind).items()})
    if issubclass(kind, enum.Enum):
        return list(kind)[-1]
    return str(next(numbers)).encode() if kind is bytes else kind(next(numbers))


def check_same(message: Message, value: Any) -> None:
    """Compare a message with what the core has of it, by the names of the fields."""
    names = [field.name for field in fields(value)] if is_dataclass(value) else list(value._fields)
    left = set(names) - NOT_IN_THE_MESSAGE
    for field in message.DESCRIPTOR.fields:
        if field.full_name in NOT_IN_THE_EVENT:
            continue
        name = RENAMED.get(field.full_name, field.name)
        assert name in left, f"{type(value).__name__} has no {name} for {field.full_name}"
        left.remove(name)
        found, expected = getattr(value, name), getattr(message, field.name)
        if field.is_repeated:
            assert len(found) == len(expected), field.full_name
            in_order = sorted(found) if isinstance(found, frozenset) else found
            for one, other in zip(expected, in_order, strict=True):
                _check_one(field, one, other)
        else:
            _check_one(field, expected, found)
    assert not left, f"{message.DESCRIPTOR.full_name} lacks {sorted(left)} of {type(value).__name__}"


def _check_one(field: Any, expected: Any, found: Any) -> None:
    if field.message_type is not None:
        check_same(expected, found)
    else:
        assert found * (1000 if field.name == "elapsed_ms" else 1) == expected, field.full_name


@pytest.mark.parametrize("name", sorted(METHODS.keys() - WITHOUT_EVENT))
def test_each_field_of_a_request_arrives_in_its_event(name: str):
    message = filled(getattr(pb, METHODS[name].input_type.name)(), count(100))
    check_same(message, READERS[name](message))


@pytest.mark.parametrize("kind", WRITERS, ids=lambda kind: kind.__name__)
def test_each_field_of_an_answer_or_a_view_goes_into_its_message(kind: type):
    value = built(kind, count(100))
    check_same(WRITERS[kind](value), value)


def test_writers_cover_all_that_the_service_sends():
    """Replicas are the servicer's own, and so is the empty answer to a report."""
    sent = {method.output_type.name for method in METHODS.values()} - {"KeepResponse", "ReportResponse"}
    pushed: list[Any] = list(pb.KeepResponse.DESCRIPTOR.fields)
    sent |= {field.message_type.name for field in pushed} - {"Replicas"}
    written = {write(built(kind, count(100))).DESCRIPTOR.name for kind, write in WRITERS.items()}
    assert written == sent


def test_fields_that_a_report_leaves_out_are_none_in_its_event():
    """Unset means "as before", which an empty disk or attachment would not."""
    event = local_wire.report_from_pb(SESSION, pb.ReportRequest(run_id="job"))
    assert (event.attachment, event.disk) == (None, None)
    assert local_wire.keep_from_pb(SESSION, pb.KeepRequest(), SECRET).attachment is None


def test_recovery_without_a_checkpoint_names_none():
    assert not local_wire.recovered_to_pb(Recovered(None, "there is none")).HasField("checkpoint")
