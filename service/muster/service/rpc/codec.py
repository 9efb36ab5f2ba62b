"""Conversion between ``muster.v1`` messages and the core's events and messages."""

from collections.abc import Collection, Iterable, Sequence, Sized
from typing import TypeVar

from google.protobuf.message import DecodeError

from muster.client.protocol import MAX_ENTRIES, PROTOCOL_VERSION
from muster.service.core.vocabulary import events
from muster.service.core.vocabulary.effects import (
    GroupJoined,
    Inspect,
    Message,
    NodesWaiting,
    ProcessesAdded,
    ProcessesRemoved,
    Progress,
    Refused,
    RoundComplete,
    RoundStopped,
    SaveAsked,
    Standing,
    Welcome,
)
from muster.service.core.vocabulary.model import Closed, Decision, SessionId
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rank_lists import JOIN_GROUP, RANK_LISTS, split_join
from muster.service.rpc import errors
from muster.service.version import VERSION
from muster.service.wire import (
    closed_to_pb,
    decision_to_pb,
    milliseconds,
    missing_to_pb,
    node_from_pb,
    settings_from_pb,
    stopped_to_pb,
    write_report_from_pb,
)
from muster.v1 import rendezvous_pb2, session_pb2
from muster.v1.insight_pb2 import Inspected

T = TypeVar("T")

STEPS_INTERVAL_MS = 5_000
"""Milliseconds between two reports of a process's training step."""


# ---------------------------------------------------------------------- in


def parse_session_message(session: SessionId, data: bytes) -> events.Event | Inspected:
    """Parse a worker's message: an event for the core, or an answer for the inspector.

    Raises:
        Refusal: the message is not of this protocol or of another version.
    """
    try:
        if data[:1] == JOIN_GROUP and (parts := split_join(data)) is not None:
            large = _large_join(session, *parts)
            if large is not None:
                return large
        request = session_pb2.ConnectRequest.FromString(data)
    except DecodeError as error:
        raise Refusal(
            Reason.INVALID_ARGUMENT,
            f"{len(data):,} bytes that are not a muster.v1.ConnectRequest ({error}). Speak the protocol "
            "of docs/protocol.md.",
        ) from None
    kind = request.WhichOneof("message")
    if kind == "arrive":
        arrive = request.arrive
        return events.Arrive(
            session,
            arrive.prefix,
            arrive.sequence,
            arrive.timeout_ms / 1000,
            tuple(
                events.Arrival(
                    a.rank,
                    a.payload,
                    a.failure if a.HasField("failure") else None,
                    write_report_from_pb(a.write) if a.HasField("write") else None,
                )
                for a in at_most("arrivals", arrive.arrivals)
            ),
            arrive.progress_after_ms / 1000,
            arrive.waited_ms / 1000,
        )
    if kind == "hello":
        return _hello(session, request.hello)
    if kind == "join_group":
        join = request.join_group
        return events.JoinGroup(
            session,
            join.prefix,
            join.world_size,
            at_most("participants", join.participants),
            at_most("ranks", join.ranks),
        )
    if kind == "goodbye":
        return events.Goodbye(session, request.goodbye.reason)
    if kind == "add_processes":
        return events.AddProcesses(session, _processes(request.add_processes.processes))
    if kind == "remove_processes":
        part = request.remove_processes
        goodbye = part.goodbye.reason if part.HasField("goodbye") else None
        return events.RemoveProcesses(session, at_most("ranks", part.ranks), goodbye)
    if kind == "steps":
        steps = at_most("steps", request.steps.steps)
        return events.Stepped(session, tuple((one.rank, one.step) for one in steps))
    if kind == "inspected":
        return request.inspected
    raise Refusal(
        Reason.INVALID_ARGUMENT,
        "a ConnectRequest without a message, or with one that this coordinator does not know "
        f"(it is version {VERSION}).",
    )


def _large_join(session: SessionId, participants: bytes, rest: bytes) -> events.JoinGroup | None:
    """Parse a join whose list of participants may be cached; None: the list is in pieces."""
    join = session_pb2.JoinGroup.FromString(rest)
    if join.participants:
        return None
    ranks = RANK_LISTS.decode(participants)
    check_count("participants", ranks)
    return events.JoinGroup(session, join.prefix, join.world_size, ranks, at_most("ranks", join.ranks))


def at_most(field: str, values: Collection[T], most: int = MAX_ENTRIES) -> tuple[T, ...]:
    """Return the entries of a repeated field, after a check of their number.

    Raises:
        Refusal: as :func:`check_count`.
    """
    if len(values) > most:
        raise _too_many(field, values, most)
    return tuple(values)


def check_count(field: str, values: Sized, most: int = MAX_ENTRIES) -> None:
    """Check the number of entries of a repeated field.

    Raises:
        Refusal: INVALID_ARGUMENT: it has more entries than any message needs.
    """
    if len(values) > most:
        raise _too_many(field, values, most)


def _too_many(field: str, values: Sized, most: int) -> Refusal:
    return Refusal(
        Reason.INVALID_ARGUMENT,
        f"{field} = {len(values):,} entries: a message may have {most:,}.",
        field=field,
    )


def join_rendezvous(session: SessionId, request: rendezvous_pb2.JoinRequest) -> events.JoinRendezvous:
    """Parse a node's join.

    Raises:
        Refusal: PROTOCOL_VERSION: the node speaks another version.
    """
    check_version(request.protocol_version)
    return events.JoinRendezvous(
        session,
        request.run_id,
        node_from_pb(request.node),
        request.attempt,
        settings_from_pb(request),
        request.round if request.HasField("round") else None,
        request.waited_ms / 1000,
    )


def check_version(given: int) -> None:
    """Check the version of the protocol that a caller speaks.

    Raises:
        Refusal: PROTOCOL_VERSION.
    """
    if given != PROTOCOL_VERSION:
        raise Refusal(
            Reason.PROTOCOL_VERSION,
            f"protocol_version = {given}: this coordinator ({VERSION}) speaks version "
            f"{PROTOCOL_VERSION}. Use an SDK of the same major version.",
            supported=PROTOCOL_VERSION,
        )


def _hello(session: SessionId, hello: session_pb2.Hello) -> events.Hello:
    check_version(hello.protocol_version)
    return events.Hello(session, hello.run_id, hello.generation, _processes(hello.processes), hello.relay)


def _processes(processes: Collection[session_pb2.Process]) -> tuple[events.ProcessInfo, ...]:
    return tuple(
        events.ProcessInfo(
            p.rank,
            p.incarnation,
            p.host,
            p.pid,
            p.ordinal,
            p.node_rank if p.HasField("node_rank") else None,
            p.age_ms / 1000,
            p.node_name,
        )
        for p in at_most("processes", processes)
    )


# ---------------------------------------------------------------------- out


def encode_session_message(message: Message) -> bytes:
    """Encode a message of the coordinator to a session."""
    response = session_pb2.ConnectResponse()
    match message:
        case Decision():
            response.decision.CopyFrom(decision_to_pb(message))
        case Welcome():
            return encode_welcome(message)
        case GroupJoined():
            response.group_joined.prefix = message.prefix
            for rank, sequence in message.positions:
                response.group_joined.positions.add(rank=rank, sequence=sequence)
        case Progress():
            response.progress.prefix = message.prefix
            response.progress.sequence = message.sequence
            response.progress.arrived = message.arrived
            response.progress.required = message.required
            response.progress.missing.extend(missing_to_pb(one) for one in message.missing)
            response.progress.message = message.message
        case Closed():
            response.closed.CopyFrom(closed_to_pb(message))
        case Refused():
            response.refusal.CopyFrom(refusal_to_pb(message.refusal))
            response.refusal.prefix = message.prefix
            if message.sequence is not None:
                response.refusal.sequence = message.sequence
            if message.rank is not None:
                response.refusal.rank = message.rank
        case ProcessesAdded():
            # Set even without entries: it answers an AddProcesses.
            response.processes_added.SetInParent()
            for one in message.entries:
                refusal = refusal_to_pb(one.refusal) if one.refusal is not None else None
                response.processes_added.entries.add(ordinal=one.ordinal, refusal=refusal)
        case ProcessesRemoved():
            response.processes_removed.CopyFrom(session_pb2.ProcessesRemoved(ranks=message.ranks))
        case SaveAsked():
            response.save_asked.number = message.number
            response.save_asked.since_sequence = message.since
            response.save_asked.stop = message.stop
            response.save_asked.reason = message.reason
            response.save_asked.withdrawn = message.withdrawn
            if message.seconds_left is not None:
                response.save_asked.deadline_ms = round(message.seconds_left * 1000)
        case Inspect():
            response.inspect.question = message.question
            response.inspect.all_threads = message.all_threads
    return response.SerializeToString()


def refusal_to_pb(refusal: Refusal) -> session_pb2.Refusal:
    """Convert a refusal to a message. The caller adds the refused subject."""
    return session_pb2.Refusal(
        code=errors.code(refusal), message=refusal.message, error_info=errors.error_info(refusal)
    )


def encode_ranks(ranks: Iterable[int]) -> bytes:
    """Encode the ranks of a relay that a message is for, as bytes to append to the message."""
    return session_pb2.ConnectResponse(ranks=ranks).SerializeToString()


def encode_welcome(message: Welcome, replicas: Sequence[str] = (), keepalive_ms: int = 0) -> bytes:
    """Encode the answer to a Hello.

    Args:
        message: the core's answer.
        replicas: the addresses of all replicas; empty: this is the only one.
        keepalive_ms: time without data until a ping; 0: a third of the session TTL.
    """
    welcome = session_pb2.Welcome(
        coordinator_version=VERSION,
        epoch=message.epoch,
        session_ttl_ms=milliseconds(message.session_ttl),
        max_payload_bytes=message.max_payload_bytes,
        ordinals=message.ordinals,
        replicas=replicas,
        keepalive_ms=keepalive_ms,
        steps_interval_ms=STEPS_INTERVAL_MS,
    )
    return session_pb2.ConnectResponse(welcome=welcome).SerializeToString()


DRAIN = session_pb2.ConnectResponse(
    drain=session_pb2.Drain(retry_after_ms=errors.RETRY_AFTER_MS)
).SerializeToString()
"""The message that asks a worker to connect again."""


def join_response(message: Message) -> rendezvous_pb2.JoinResponse:
    """Convert a message of the core to a node."""
    match message:
        case Standing():
            return rendezvous_pb2.JoinResponse(
                standing=rendezvous_pb2.Standing(
                    standing=rendezvous_pb2.NodeStanding.ValueType(message.standing),
                    round=message.round,
                    message=message.message,
                )
            )
        case RoundComplete():
            return rendezvous_pb2.JoinResponse(
                round_complete=rendezvous_pb2.RoundComplete(
                    round=message.round, rank=message.rank, world_size=message.world_size
                )
            )
        case NodesWaiting():
            return rendezvous_pb2.JoinResponse(
                nodes_waiting=rendezvous_pb2.NodesWaiting(count=message.count, lost=message.lost)
            )
        case Closed():
            return rendezvous_pb2.JoinResponse(closed=closed_to_pb(message))
        case RoundStopped():
            return rendezvous_pb2.JoinResponse(
                stopped=rendezvous_pb2.RoundStopped(
                    stopped=stopped_to_pb(message.stopped), nodes_gone=message.nodes_gone
                )
            )
        case _:
            raise TypeError(f"not for a node: {message!r}")
