"""``muster trace``: draws where the time of a barrier went, from what the coordinator knows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from muster.client.trace_ids import barrier_trace, trace_text
from muster.service.cli import options
from muster.service.cli.client.coordinator_client import connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.options import Output
from muster.service.cli.views import columns
from muster.service.cli.views.table import document, emit, fields, terminal_width
from muster.service.formatting.cells import duration
from muster.service.wire import as_dict
from muster.v1 import barrier_pb2

WIDTH = 100
"""Columns of the drawing where stdout is no terminal."""
MIN_BAR = 10
"""Fewest columns of the bars, however narrow the terminal."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a barrier's time, in milliseconds since the first arrival."""

    name: str
    start: int
    end: int


@connecting
def trace(
    run: options.Run,
    prefix: options.Prefix,
    sequence: Annotated[
        int,
        typer.Argument(min=0, max=2**64 - 1, metavar="SEQUENCE", help="The barrier's number."),
    ],
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Draw where the time of a barrier went, and show the id of its trace."""
    with connect(endpoint, timeout) as client:
        found = client.barrier(run, prefix, sequence)
    barrier = found.barrier
    if output is Output.JSON:
        emit(document({**trace_document(barrier), **as_dict(found)}))
    else:
        emit(trace_text_of(barrier, terminal_width() or WIDTH))


def phases(barrier: barrier_pb2.Barrier) -> list[Phase]:
    """Return the parts of a barrier's time, in order; those of an open barrier end now."""
    if not barrier.HasField("decision"):
        return [Phase("ranks arrive, so far", 0, barrier.age_ms)]
    decision = barrier.decision
    if not decision.HasField("last_arrival_rank"):
        return [Phase("nobody arrives", 0, decision.wait_ms)]
    # Each is rounded by itself.
    skew = min(decision.skew_ms, decision.wait_ms)
    ending = "decided" if not barrier.missing else "waits for the missing"
    return [Phase("ranks arrive", 0, skew), Phase(ending, skew, decision.wait_ms)]


def trace_document(barrier: barrier_pb2.Barrier) -> dict[str, Any]:
    """Return the trace as JSON shows it."""
    return {
        "trace_id": _trace_id(barrier),
        "phases": [{"name": one.name, "start_ms": one.start, "end_ms": one.end} for one in phases(barrier)],
    }


def trace_text_of(barrier: barrier_pb2.Barrier, width: int) -> str:
    """Draw a barrier for people.

    Args:
        barrier: the barrier.
        width: columns of the terminal.
    """
    shown = {
        "Trace": _trace_id(barrier),
        "Barrier": f"{barrier.run_id} {barrier.prefix} #{barrier.sequence}",
        "State": columns.barrier_state(barrier),
        "Arrived": f"{barrier.arrived} of {barrier.required}",
    }
    if barrier.HasField("decision"):
        shown["Decided"] = columns.decided_at(barrier)
        if barrier.decision.HasField("last_arrival_rank"):
            shown["Last"] = f"rank {barrier.decision.last_arrival_rank}"
    return f"{fields(shown)}\n\n{waterfall(phases(barrier), width)}"


def waterfall(parts: Sequence[Phase], width: int) -> str:
    """Draw phases below each other, each with its name, its bar and its duration.

    Args:
        parts: the phases, in order.
        width: columns of a line.
    """
    names = max(len(one.name) for one in parts)
    times = [duration(one.end - one.start) for one in parts]
    bars = max(MIN_BAR, width - names - max(map(len, times)) - 4)
    total = max(*(one.end for one in parts), 1)
    return "\n".join(
        f"{one.name:<{names}}  {_bar(one, total, bars)}  {time}"
        for one, time in zip(parts, times, strict=True)
    )


def _bar(phase: Phase, total: int, width: int) -> str:
    """Draw a bar that is never empty: a short phase is seen, too."""
    start = min(phase.start * width // total, width - 1)
    end = max(-(-phase.end * width // total), start + 1)
    return f"{' ' * start}{'█' * (end - start)}".ljust(width)


def _trace_id(barrier: barrier_pb2.Barrier) -> str:
    return trace_text(barrier_trace(barrier.run_id, barrier.prefix, barrier.sequence))
