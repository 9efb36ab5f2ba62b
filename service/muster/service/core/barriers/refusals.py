"""Why a group refuses a join or an arrival, and how it words a disagreement."""

from muster.service.core.barriers.barrier import OpenBarrier
from muster.service.core.membership.process import Process
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.limits import SMALL_GATHER_BYTES, Limits
from muster.service.core.vocabulary.model import Shape
from muster.service.core.vocabulary.records import RankOwnerRecord
from muster.service.core.vocabulary.refusal import Reason, Refusal, limit_exceeded


def not_a_participant(prefix: str, process: Process | str, rank: int, shape: Shape) -> Refusal:
    """Return the refusal for a process whose rank is not in the shape that it brings."""
    return Refusal(
        Reason.NOT_A_PARTICIPANT,
        f'{process} cannot join group "{prefix}": {describe_shape(shape)} does not '
        f"include rank {rank}. Fix the rank, the world size or the participants.",
    )


def shape_changed(prefix: str, process: Process, before: Shape, now: Shape) -> Refusal:
    """Return the refusal for a process that joins a second time with another shape."""
    return Refusal(
        Reason.SHAPE_CHANGED,
        f'{process} joined group "{prefix}" with {describe_shape(before)} and now '
        f"says {describe_shape(now)}. Use another prefix for other participants.",
    )


def superseded(run_id: str, prefix: str, older: Process, newer: Process | RankOwnerRecord) -> Refusal:
    """Return the refusal for a process whose rank has a newer owner."""
    name = report.process_name(newer.rank, newer.host, newer.pid)
    return Refusal(
        Reason.SUPERSEDED,
        f'{older} no longer speaks for its rank in group "{prefix}" of run {run_id}: '
        f"{name} said hello later. End one of the two.",
        newer_host=newer.host,
        newer_pid=newer.pid,
    )


def not_joined(run_id: str, prefix: str, process: Process) -> Refusal:
    """Return the refusal for an arrival at a group that the process has not joined."""
    return Refusal(
        Reason.NOT_JOINED,
        f'{process} arrived at group "{prefix}" of run {run_id} without having joined '
        "it. Send JoinGroup first.",
    )


def sequence_behind(prefix: str, process: Process | str, sequence: int, start: int) -> Refusal:
    """Return the refusal for an arrival at a barrier that was released before the process joined."""
    return Refusal(
        Reason.SEQUENCE_BEHIND,
        f'{process} arrived at #{sequence} of group "{prefix}", which was decided '
        f"before this process joined; it starts at #{start}. Take the sequence from the "
        "coordinator's answer to JoinGroup.",
        start_sequence=start,
    )


def sequence_forgotten(prefix: str, process: Process | str, sequence: int, next_sequence: int) -> Refusal:
    """Return the refusal for an arrival at a barrier whose decision is no longer kept."""
    return Refusal(
        Reason.SEQUENCE_FORGOTTEN,
        f'{process} arrived at #{sequence} of group "{prefix}" again, long after '
        f"every rank had gone on to #{next_sequence}; its outcome is no longer kept.",
        next_sequence=next_sequence,
    )


def payloads_dropped(prefix: str, process: Process | str, sequence: int, next_sequence: int) -> Refusal:
    """Return the refusal for an arrival at a release without its payloads, which were dropped."""
    return Refusal(
        Reason.SEQUENCE_FORGOTTEN,
        f'{process} arrived at #{sequence} of group "{prefix}" again, which was released. Its payloads '
        "are no longer kept: the run was unused for long, and others needed the room. "
        f"Go on at #{next_sequence}.",
        next_sequence=next_sequence,
    )


def sequence_ahead(prefix: str, process: Process | str, sequence: int, upcoming: int) -> Refusal:
    """Return the refusal for an arrival at a barrier after the next one."""
    return Refusal(
        Reason.SEQUENCE_AHEAD,
        f'{process} arrived at #{sequence} of group "{prefix}", whose next barrier is '
        f"#{upcoming}. Either the process did not take its sequence from the coordinator, or the run "
        "was forgotten, or the coordinator lost its state (memory: storage does not survive a "
        "restart). Start the run as a new generation.",
        next_sequence=upcoming,
    )


def payload_overflow(prefix: str, barrier: OpenBarrier, all_bytes: int, limits: Limits) -> Refusal | None:
    """Return why the barrier must fail for all ranks, if the last payload exceeds a bound; else None.

    A payload above ``max_payload_bytes`` is its rank's own mistake, and the coordinator refuses that
    arrival alone. The other two bounds depend on the payloads of others. If the coordinator refused one
    arrival, the other ranks would wait for it until the timeout. The refused rank would keep its
    sequence, and its next arrival, meant for a later barrier, would complete this one. A decision ends
    the sequence for all, by invariant 4 (ranks stay in step after a failure), and frees the payloads.

    Args:
        prefix: the group.
        barrier: the barrier, with the last payload.
        all_bytes: payload bytes of all runs.
        limits: the bounds.
    """
    name = f'"{prefix}" #{barrier.sequence}'
    if barrier.payload_bytes > limits.max_gather_bytes:
        return limit_exceeded(
            "max_gather_bytes",
            limits.max_gather_bytes,
            f"the payloads of {name} come to {barrier.payload_bytes:,} bytes with those of "
            f"{len(barrier.arrivals)} of {barrier.shape.size} ranks",
        )
    if all_bytes > limits.total_gather_bytes(barrier.payload_bytes):
        reserved = ""
        if all_bytes <= limits.max_total_gather_bytes:
            reserved = f", and the last eighth is for barriers with {SMALL_GATHER_BYTES:,} bytes at most"
        return limit_exceeded(
            "max_total_gather_bytes",
            limits.max_total_gather_bytes,
            f"the payloads of all runs come to {all_bytes:,} bytes with this one for {name}{reserved}",
        )
    return None


def describe_shape(shape: Shape) -> str:
    """Return the shape in words."""
    if not shape.participants:
        return f"world size {shape.world_size}"
    return f"participants {report.ranges(shape.participants)} of world size {shape.world_size}"


def describe_disagreement(one: tuple[Process, Shape], other: tuple[Process, Shape]) -> str:
    """Return how the shapes of two processes differ, in words."""
    (process, shape), (other_process, other_shape) = one, other
    names = str(process), str(other_process)
    if shape.world_size != other_shape.world_size:
        sizes = str(shape.world_size), str(other_shape.world_size)
        return report.mismatched("world size", names[0], sizes[0], names[1], sizes[1])
    lists = report.ranges(shape), report.ranges(other_shape)
    return report.mismatched("participants", names[0], lists[0], names[1], lists[1])


def cut(text: str, limit: int) -> str:
    """Return the text, cut after ``limit`` bytes of UTF-8 if it is longer."""
    data = text.encode("utf-8", "replace")
    if len(data) <= limit:
        return text
    return data[:limit].decode("utf-8", "ignore") + f" … (cut at {limit:,} bytes)"
