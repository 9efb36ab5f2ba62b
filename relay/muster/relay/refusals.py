"""Refusals of a relay: for messages that it cannot read, or that would end the stream that many share.

It forwards all other messages, and the coordinator judges them.
"""

from google.protobuf.any_pb2 import Any
from google.rpc.code_pb2 import (
    ABORTED,
    FAILED_PRECONDITION,
    INVALID_ARGUMENT,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
)
from google.rpc.error_details_pb2 import ErrorInfo

from muster.client.protocol import ERROR_DOMAIN
from muster.v1 import session_pb2 as pb


class Refused(Exception):
    """The relay does not accept a message or a call; the stream or call ends with the refusal.

    Args:
        refusal: what its sender receives.
    """

    def __init__(self, refusal: pb.Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


def invalid(field: str, value: object, why: str) -> Refused:
    """Refuse a field that no coordinator accepts."""
    return Refused(_refusal(INVALID_ARGUMENT, "INVALID_ARGUMENT", f"{field} = {value}: {why}.", field=field))


def not_a_message(data: bytes, why: object) -> Refused:
    """Refuse bytes of another protocol, or of a newer one."""
    return Refused(
        _refusal(
            INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            f"{len(data):,} bytes that are not a muster.v1.ConnectRequest that this relay knows ({why}). "
            "Speak the protocol of docs/protocol.md.",
        )
    )


def too_large(size: int, most: int) -> Refused:
    """Refuse a message that is too large for the coordinator."""
    return Refused(
        _refusal(
            RESOURCE_EXHAUSTED,
            "LIMIT_EXCEEDED",
            f"a message of {size:,} bytes: the relay takes {most:,} from one stream, which is what the "
            "coordinator takes from one rank. Hand in less, or raise max_payload_bytes on the coordinator.",
            limit="max_payload_bytes",
        )
    )


def other_protocol(given: int, version: str, known: int) -> Refused:
    """Refuse a stream that speaks another version of the protocol than this relay."""
    return Refused(
        _refusal(
            FAILED_PRECONDITION,
            "PROTOCOL_VERSION",
            f"protocol_version = {given}: this relay ({version}) speaks version {known}. Use an SDK of the "
            "same major version.",
            supported=str(known),
        )
    )


def hello_required(why: str) -> Refused:
    """Refuse a stream that sends something before its Hello, or nothing at all."""
    return Refused(
        _refusal(FAILED_PRECONDITION, "HELLO_REQUIRED", f"{why}. Open another session, and say Hello first.")
    )


def hello_repeated() -> Refused:
    """Refuse a stream that sends a second Hello."""
    return Refused(
        _refusal(
            FAILED_PRECONDITION,
            "HELLO_REPEATED",
            "this session has said hello already; open another one.",
        )
    )


def not_in_session(rank: int, prefix: str, sequence: int | None) -> pb.Refusal:
    """Refuse an arrival or a join for a rank of another stream; this stream continues."""
    refusal = _refusal(
        INVALID_ARGUMENT,
        "RANK_NOT_IN_SESSION",
        f"rank {rank} is not one of those that this session said hello for. Name every rank in the Hello.",
    )
    refusal.prefix, refusal.rank = prefix, rank
    if sequence is not None:
        refusal.sequence = sequence
    return refusal


def replaced(process: pb.Process) -> pb.Refusal:
    """End the old stream of a process that has connected again."""
    return _refusal(
        ABORTED,
        "SESSION_REPLACED",
        f"rank {process.rank} ({process.host}, pid {process.pid}) has opened another session; this one is "
        "over.",
    )


def slow_consumer(waiting: int) -> pb.Refusal:
    """Refuse a caller that does not read its messages."""
    return _refusal(
        RESOURCE_EXHAUSTED,
        "SLOW_CONSUMER",
        f"{waiting} messages were waiting for this session to read them. Connect again and read what comes.",
    )


def unread(held: int) -> Refused:
    """Refuse an answer to an address that does not read the answers before it."""
    return Refused(
        _refusal(
            RESOURCE_EXHAUSTED,
            "SLOW_CONSUMER",
            f"answers of {held:,} bytes were waiting for this address to read them. Read, and ask again.",
        )
    )


def upstream_lost(why: str) -> pb.Refusal:
    """Say that the relay's own stream broke: the caller connects again, and repeats what is open."""
    return _refusal(
        UNAVAILABLE,
        "UPSTREAM_LOST",
        f"this relay has lost the coordinator ({why}). Connect again; nothing has failed.",
    )


def cut_off(why: str) -> pb.Refusal:
    """Say that the relay reaches no coordinator: the caller connects directly if it can."""
    return _refusal(
        UNAVAILABLE,
        "RELAY_CUT_OFF",
        f"this relay does not reach the coordinator ({why}). Connect directly, or again later; nothing has "
        "failed.",
    )


def draining() -> pb.Refusal:
    """Say that the relay stops: the caller continues without it."""
    return _refusal(
        UNAVAILABLE, "RELAY_CUT_OFF", "this relay is stopping. Connect directly; nothing has failed."
    )


def _refusal(code: int, reason: str, message: str, **metadata: str) -> pb.Refusal:
    packed = Any()
    packed.Pack(ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=metadata))
    return pb.Refusal(code=code, message=message, error_info=packed)


def info_of(refusal: pb.Refusal) -> ErrorInfo:
    """Return a refusal's details for programs."""
    info = ErrorInfo()
    refusal.error_info.Unpack(info)
    return info
