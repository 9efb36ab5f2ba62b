"""Conversion between the core's types and the messages of ``muster.v1``, for network, storage and people."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from muster.service.core import barrier_views, views
from muster.service.core.vocabulary.events import WriteReport
from muster.service.core.vocabulary.model import (
    Checkpoint,
    Closed,
    CoveredSave,
    Decision,
    FailedSave,
    Failure,
    HandledNotice,
    MissingRank,
    MissingState,
    NodeInfo,
    Outcome,
    RendezvousSettings,
    Save,
    SaveState,
    SlowestWrite,
    Stopped,
)
from muster.v1 import barrier_pb2, rendezvous_pb2, run_pb2, state_pb2
from muster.v1 import common_pb2 as pb


def decision_to_pb(decision: Decision) -> pb.Decision:
    """Convert a decision to a message."""
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
        payloads_dropped=decision.payloads_dropped,
    )


def decision_from_pb(message: pb.Decision) -> Decision:
    """Convert a message to a decision.

    Raises:
        ValueError: this version does not know the outcome or a missing state.
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
        payloads_dropped=message.payloads_dropped,
    )


def missing_to_pb(missing: MissingRank) -> pb.MissingRank:
    """Convert a missing rank to a message."""
    return pb.MissingRank(
        rank=missing.rank,
        host=missing.host,
        pid=missing.pid,
        state=pb.MissingState.ValueType(missing.state),
        gone_ms=milliseconds(missing.gone_for),
        last_sequence=missing.last_sequence,
        doing=missing.doing,
    )


def missing_from_pb(message: pb.MissingRank) -> MissingRank:
    """Convert a message to a missing rank.

    Raises:
        ValueError: this version does not know the rank's state.
    """
    return MissingRank(
        rank=message.rank,
        state=MissingState(message.state),
        host=message.host,
        pid=message.pid,
        gone_for=message.gone_ms / 1000,
        last_sequence=message.last_sequence if message.HasField("last_sequence") else None,
        doing=message.doing,
    )


def write_report_from_pb(message: pb.WriteReport) -> WriteReport:
    """Convert a message to a rank's report of its part of a save."""
    return WriteReport(
        step=message.step if message.HasField("step") else None,
        bytes=message.bytes if message.HasField("bytes") else None,
        seconds=message.write_ms / 1000 if message.HasField("write_ms") else None,
        commits=message.commits,
        gives_up=message.gives_up,
    )


def closed_to_pb(closed: Closed) -> pb.Closed:
    """Convert the record of a run's closing to a message."""
    return pb.Closed(by=closed.by, reason=closed.reason, closed_at=timestamp_to_pb(closed.at))


def stopped_to_pb(stopped: Stopped) -> pb.Stopped:
    """Convert how a run was stopped."""
    return pb.Stopped(
        step=stopped.step,
        by=stopped.by,
        reason=stopped.reason,
        stopped_at=timestamp_to_pb(stopped.at),
        generation=stopped.generation,
    )


def stopped_from_pb(message: pb.Stopped) -> Stopped:
    """Convert a message to how a run was stopped."""
    at = timestamp_from_pb(message.stopped_at)
    return Stopped(message.step, message.by, message.reason, at, message.generation)


def closed_from_pb(message: pb.Closed) -> Closed:
    """Convert a message to the record of a run's closing."""
    return Closed(message.by, message.reason, timestamp_from_pb(message.closed_at))


def node_to_pb(node: NodeInfo) -> rendezvous_pb2.Node:
    """Convert a node to a message."""
    return rendezvous_pb2.Node(
        incarnation=node.incarnation, address=node.address, pid=node.pid, name=node.name
    )


def node_from_pb(message: rendezvous_pb2.Node) -> NodeInfo:
    """Convert a message to a node."""
    return NodeInfo(message.incarnation, message.address, message.pid, message.name)


def settings_from_pb(
    message: rendezvous_pb2.JoinRequest | state_pb2.ParticipantRecord | state_pb2.AgreementRecord,
) -> RendezvousSettings:
    """Read a node's rendezvous settings from a message that carries them."""
    return RendezvousSettings(
        min_nodes=message.min_nodes,
        max_nodes=message.max_nodes,
        join_timeout=message.join_timeout_ms / 1000,
        last_call_timeout=message.last_call_timeout_ms / 1000,
        keep_alive_timeout=message.keep_alive_timeout_ms / 1000,
    )


def timestamp_to_pb(wall: float) -> Timestamp:
    """Convert seconds since 1970, rounded so that they stay equal however often they are stored."""
    seconds, micros = divmod(round(wall * 1_000_000), 1_000_000)
    return Timestamp(seconds=seconds, nanos=micros * 1000)


def timestamp_from_pb(message: Timestamp) -> float:
    """Convert a message to seconds since 1970."""
    return message.seconds + message.nanos / 1e9


def milliseconds(seconds: float) -> int:
    """Convert a duration to the unit of the wire."""
    return max(0, round(seconds * 1000))


# ---------------------------------------------------------------------- for people


def barrier_to_pb(view: barrier_views.BarrierView) -> barrier_pb2.Barrier:
    """A barrier as people see it: without the payloads, which are for its ranks and may be large."""
    decision = None
    if view.decision is not None:
        decision = decision_to_pb(dataclasses.replace(view.decision, payloads=()))
    return barrier_pb2.Barrier(
        run_id=view.run_id,
        prefix=view.prefix,
        sequence=view.sequence,
        generation=view.generation,
        arrived=view.arrived,
        required=view.required,
        age_ms=milliseconds(view.age),
        remaining_ms=milliseconds(view.remaining),
        missing=[missing_to_pb(one) for one in view.missing],
        decision=decision,
        message=view.message,
    )


def run_to_pb(view: views.RunView) -> run_pb2.Run:
    """Convert a run for people."""
    return run_pb2.Run(
        run_id=view.run_id,
        generation=view.generation,
        connected=view.connected,
        members=view.members,
        groups=view.groups,
        open_barriers=view.open_barriers,
        decided_barriers=view.decided_barriers,
        round=view.round,
        nodes=view.nodes,
        nodes_waiting=view.nodes_waiting,
        store_keys=view.store_keys,
        store_bytes=view.store_bytes,
        closed=closed_to_pb(view.closed) if view.closed is not None else None,
        stopped=stopped_to_pb(view.stopped) if view.stopped is not None else None,
        steps=steps_to_pb(view.steps) if view.steps is not None else None,
        save=save_to_pb(view.save) if view.save is not None else None,
        checkpoints=checkpoints_to_pb(view.checkpoints) if view.checkpoints is not None else None,
    )


def save_to_pb(save: Save) -> run_pb2.Save:
    """Convert a save that was asked for."""
    return run_pb2.Save(
        number=save.number,
        state=run_pb2.SaveState.ValueType(save.state),
        stop=save.stop,
        by=save.by,
        reason=save.reason,
        asked_at=timestamp_to_pb(save.asked_at),
        step=save.step,
        ended_at=timestamp_to_pb(save.ended_at) if save.ended_at is not None else None,
        generation=save.generation,
        across_generations=save.across_generations,
        deadline=timestamp_to_pb(save.deadline) if save.deadline is not None else None,
        late=save.late,
    )


def save_record_to_pb(run_id: str, save: Save) -> state_pb2.SaveRecord:
    """Convert a save that was asked for to its record."""
    return state_pb2.SaveRecord(
        run_id=run_id,
        save=save_to_pb(save),
        since_sequence=save.since,
        notices=[state_pb2.HandledNotice(id=one.id, number=one.number) for one in save.notices],
        covered=_covered_to_pb(save.covered) if save.covered is not None else None,
    )


def _covered_to_pb(covered: CoveredSave) -> state_pb2.CoveredSave:
    deadline = timestamp_to_pb(covered.deadline) if covered.deadline is not None else None
    return state_pb2.CoveredSave(by=covered.by, reason=covered.reason, deadline=deadline)


def _covered_from_pb(message: state_pb2.CoveredSave) -> CoveredSave:
    deadline = timestamp_from_pb(message.deadline) if message.HasField("deadline") else None
    return CoveredSave(message.by, message.reason, deadline)


def save_from_pb(record: state_pb2.SaveRecord) -> Save:
    """Convert a record to a save that was asked for."""
    message = record.save
    return Save(
        number=message.number,
        state=SaveState(message.state),
        stop=message.stop,
        by=message.by,
        reason=message.reason,
        asked_at=timestamp_from_pb(message.asked_at),
        since=record.since_sequence,
        step=message.step if message.HasField("step") else None,
        ended_at=timestamp_from_pb(message.ended_at) if message.HasField("ended_at") else None,
        generation=message.generation,
        across_generations=message.across_generations,
        covered=_covered_from_pb(record.covered) if record.HasField("covered") else None,
        deadline=timestamp_from_pb(message.deadline) if message.HasField("deadline") else None,
        late=message.late,
        notices=tuple(HandledNotice(one.id, one.number) for one in record.notices),
    )


def checkpoints_to_pb(view: views.CheckpointsView) -> run_pb2.Checkpoints:
    """Convert the save history of a run for people."""
    history = view.history
    return run_pb2.Checkpoints(
        newest=checkpoint_to_pb(history.newest) if history.newest is not None else None,
        age_ms=milliseconds(view.age),
        committed=history.committed,
        interval_ms=milliseconds(history.interval) if history.interval is not None else None,
        failures=[failed_save_to_pb(one) for one in history.failures],
    )


def checkpoint_to_pb(checkpoint: Checkpoint) -> run_pb2.Checkpoint:
    """Convert a committed checkpoint to a message."""
    slowest = checkpoint.slowest
    return run_pb2.Checkpoint(
        step=checkpoint.step,
        committed_at=timestamp_to_pb(checkpoint.committed_at),
        bytes=checkpoint.bytes,
        slowest=(
            run_pb2.SlowestWrite(rank=slowest.rank, host=slowest.host, write_ms=milliseconds(slowest.seconds))
            if slowest is not None
            else None
        ),
        barrier=pb.BarrierName(prefix=checkpoint.prefix, sequence=checkpoint.sequence),
    )


def checkpoint_from_pb(message: run_pb2.Checkpoint) -> Checkpoint:
    """Convert a message to a committed checkpoint."""
    slowest = message.slowest
    return Checkpoint(
        step=message.step if message.HasField("step") else None,
        committed_at=timestamp_from_pb(message.committed_at),
        bytes=message.bytes if message.HasField("bytes") else None,
        slowest=(
            SlowestWrite(slowest.rank, slowest.host, slowest.write_ms / 1000)
            if message.HasField("slowest")
            else None
        ),
        prefix=message.barrier.prefix,
        sequence=message.barrier.sequence,
    )


def failed_save_to_pb(failed: FailedSave) -> run_pb2.FailedSave:
    """Convert a failed save to a message."""
    return run_pb2.FailedSave(
        step=failed.step,
        failed_at=timestamp_to_pb(failed.failed_at),
        reason=failed.reason,
        barrier=pb.BarrierName(prefix=failed.prefix, sequence=failed.sequence),
    )


def failed_save_from_pb(message: run_pb2.FailedSave) -> FailedSave:
    """Convert a message to a failed save."""
    return FailedSave(
        step=message.step if message.HasField("step") else None,
        failed_at=timestamp_from_pb(message.failed_at),
        reason=message.reason,
        prefix=message.barrier.prefix,
        sequence=message.barrier.sequence,
    )


def steps_to_pb(view: views.StepsView) -> run_pb2.RunSteps:
    """Convert the training steps of a run for people."""
    return run_pb2.RunSteps(highest=view.highest, lowest=view.lowest, lowest_rank=view.lowest_rank)


def nodes_to_pb(nodes: Iterable[views.NodeView]) -> list[rendezvous_pb2.NodeView]:
    """Convert nodes for people."""
    return [
        rendezvous_pb2.NodeView(
            node=node_to_pb(node.info),
            standing=rendezvous_pb2.NodeStanding.ValueType(node.standing),
            rank=node.rank,
            connected=node.connected,
            since_ms=milliseconds(node.since),
        )
        for node in nodes
    ]


def rendezvous_to_pb(view: views.RendezvousView) -> rendezvous_pb2.Rendezvous:
    """Convert a rendezvous for people."""
    settings = view.settings
    return rendezvous_pb2.Rendezvous(
        run_id=view.run_id,
        round=view.round,
        complete=view.complete,
        min_nodes=settings.min_nodes if settings is not None else 0,
        max_nodes=settings.max_nodes if settings is not None else 0,
        nodes=nodes_to_pb(view.nodes),
        departed=[
            rendezvous_pb2.DepartedNode(
                node=node_to_pb(one.info),
                round=one.round,
                reason=one.reason,
                since_ms=milliseconds(view.now - one.at),
            )
            for one in view.departed
        ],
        rounds=[
            rendezvous_pb2.Round(
                round=one.round,
                world_size=one.world_size,
                completed_at=timestamp_to_pb(one.completed_at),
                join_ms=milliseconds(one.join_seconds),
            )
            for one in view.rounds
        ],
        closed=closed_to_pb(view.closed) if view.closed is not None else None,
        stopped=stopped_to_pb(view.stopped) if view.stopped is not None else None,
        message=view.message,
    )


def barrier_names_to_pb(names: Iterable[tuple[str, int]]) -> list[pb.BarrierName]:
    """Convert prefixes and sequences to messages."""
    return [pb.BarrierName(prefix=prefix, sequence=sequence) for prefix, sequence in names]


def members_to_pb(members: Iterable[views.MemberView]) -> list[run_pb2.Member]:
    """Convert members for people."""
    return [
        run_pb2.Member(
            rank=member.rank,
            incarnation=member.incarnation,
            ordinal=member.ordinal,
            host=member.host,
            pid=member.pid,
            state=pb.MemberState.ValueType(member.state),
            since_ms=milliseconds(member.since),
            generation=member.generation,
            node_rank=member.node_rank,
            node_name=member.node_name,
            relay=member.relay,
            step=member.step,
            step_ms=milliseconds(member.step_age),
            groups=[
                run_pb2.GroupPosition(prefix=prefix, last_sequence=last) for prefix, last in member.groups
            ],
        )
        for member in members
    ]


def as_dict(message: Message) -> dict[str, Any]:
    """Convert a message for JSON, with the names of its proto and with zero values."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
