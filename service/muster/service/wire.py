"""Between the core's words and the messages of ``muster.v1``, for the network and for storage."""

from google.protobuf.timestamp_pb2 import Timestamp

from muster.service.core.model import (
    Closed,
    Decision,
    Failure,
    MissingRank,
    MissingState,
    NodeInfo,
    Outcome,
    RendezvousSettings,
)
from muster.v1 import common_pb2 as pb
from muster.v1 import rendezvous_pb2, state_pb2


def decision_to_pb(decision: Decision) -> pb.Decision:
    """A decision as a message."""
    return pb.Decision(
        run_id=decision.run_id,
        prefix=decision.prefix,
        sequence=decision.sequence,
        generation=decision.generation,
        outcome=pb.Outcome.ValueType(decision.outcome),
        message=decision.message,
        missing=[missing_to_pb(one) for one in decision.missing],
        arrived=decision.arrived,
        required=decision.required,
        payloads=[pb.Payload(rank=rank, data=data) for rank, data in decision.payloads],
        failures=[
            pb.Failure(rank=f.rank, host=f.host, pid=f.pid, reason=f.reason) for f in decision.failures
        ],
        decided_at=timestamp_to_pb(decision.decided_at),
        wait_ms=milliseconds(decision.wait),
        skew_ms=milliseconds(decision.skew),
        last_arrival_rank=decision.last_arrival_rank,
    )


def decision_from_pb(message: pb.Decision) -> Decision:
    """A message as a decision.

    Raises:
        ValueError: the outcome or a missing state is not known to this version.
    """
    return Decision(
        run_id=message.run_id,
        prefix=message.prefix,
        sequence=message.sequence,
        generation=message.generation,
        outcome=Outcome(message.outcome),
        message=message.message,
        missing=tuple(missing_from_pb(one) for one in message.missing),
        arrived=message.arrived,
        required=message.required,
        payloads=tuple((one.rank, one.data) for one in message.payloads),
        failures=tuple(Failure(f.rank, f.host, f.pid, f.reason) for f in message.failures),
        decided_at=timestamp_from_pb(message.decided_at),
        wait=message.wait_ms / 1000,
        skew=message.skew_ms / 1000,
        last_arrival_rank=(message.last_arrival_rank if message.HasField("last_arrival_rank") else None),
    )


def missing_to_pb(missing: MissingRank) -> pb.MissingRank:
    """A missing rank as a message."""
    return pb.MissingRank(
        rank=missing.rank,
        host=missing.host,
        pid=missing.pid,
        state=pb.MissingState.ValueType(missing.state),
        gone_ms=milliseconds(missing.gone_for),
        last_sequence=missing.last_sequence,
    )


def missing_from_pb(message: pb.MissingRank) -> MissingRank:
    """A message as a missing rank.

    Raises:
        ValueError: its state is not known to this version.
    """
    return MissingRank(
        rank=message.rank,
        state=MissingState(message.state),
        host=message.host,
        pid=message.pid,
        gone_for=message.gone_ms / 1000,
        last_sequence=message.last_sequence if message.HasField("last_sequence") else None,
    )


def closed_to_pb(closed: Closed) -> pb.Closed:
    """How a run was closed, as a message."""
    return pb.Closed(by=closed.by, reason=closed.reason, closed_at=timestamp_to_pb(closed.at))


def closed_from_pb(message: pb.Closed) -> Closed:
    """A message as how a run was closed."""
    return Closed(message.by, message.reason, timestamp_from_pb(message.closed_at))


def node_to_pb(node: NodeInfo) -> rendezvous_pb2.Node:
    """A node as a message."""
    return rendezvous_pb2.Node(incarnation=node.incarnation, address=node.address, pid=node.pid)


def node_from_pb(message: rendezvous_pb2.Node) -> NodeInfo:
    """A message as a node."""
    return NodeInfo(message.incarnation, message.address, message.pid)


def settings_from_pb(message: rendezvous_pb2.JoinRequest | state_pb2.ParticipantRecord) -> RendezvousSettings:
    """What a node wants of a round, from the messages that carry it."""
    return RendezvousSettings(
        min_nodes=message.min_nodes,
        max_nodes=message.max_nodes,
        join_timeout=message.join_timeout_ms / 1000,
        last_call_timeout=message.last_call_timeout_ms / 1000,
        keep_alive_timeout=message.keep_alive_timeout_ms / 1000,
    )


def timestamp_to_pb(wall: float) -> Timestamp:
    """Seconds since 1970 as a message: rounded, not cut, so it stays the same however often it is stored."""
    seconds, micros = divmod(round(wall * 1_000_000), 1_000_000)
    return Timestamp(seconds=seconds, nanos=micros * 1000)


def timestamp_from_pb(message: Timestamp) -> float:
    """A message as seconds since 1970."""
    return message.seconds + message.nanos / 1e9


def milliseconds(seconds: float) -> int:
    """A duration as the wire has it."""
    return max(0, round(seconds * 1000))
