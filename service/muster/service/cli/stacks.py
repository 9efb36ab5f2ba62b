"""Where the processes of a run stand, as lines for people."""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len

from muster.service.cells import duration
from muster.service.cli.table import counted
from muster.service.core import report
from muster.service.insight.words import STATES
from muster.v1 import insight_pb2

MOST_ALIGNED = 40
"""Cells of the column of functions; after a longer name its file follows at once."""


def stacks_lines(run_id: str, response: insight_pb2.StacksResponse) -> list[str]:
    """Who answered and who differs from most, then each crowd, then those of whom nothing is known."""
    answered = sum(len(crowd.members) for crowd in response.crowds)
    asked = answered + sum(len(crowd.members) for crowd in response.silent)
    processes = counted(asked, "process", "processes")
    lines = [_one_line(f"run {run_id}: {answered:,} of {processes} answered")]
    if len(response.crowds) > 1 and 2 * len(response.crowds[0].members) > answered:
        others = [member for crowd in response.crowds[1:] for member in crowd.members]
        differ = counted(len(others), "differs", "differ")
        lines.append(f"{differ} from the crowd: {_ranks(one.rank for one in others)}")
    for crowd in response.crowds:
        lines += ["", *_crowd(crowd)]
    if response.silent:
        lines += ["", *map(_silent, response.silent)]
    return lines


# ---------------------------------------------------------------------- crowds


def _crowd(crowd: insight_pb2.Crowd) -> list[str]:
    members = crowd.members
    own = members[0].report if len(members) == 1 and members[0].HasField("report") else None
    lines = [_who(members)]
    if crowd.line:
        lines.append(f"  {_one_line(crowd.line)}")
    if own is not None:
        lines.append(f"  {_facts(own)}")
    for thread in sorted(crowd.threads, key=lambda one: not one.main):
        if thread.frames:  # That the main one has ended is said.
            lines += (f"  {line}" for line in _thread(thread))
    if own is not None and own.threads_left_out:
        lines.append(f"  … {counted(own.threads_left_out, 'more thread', 'more threads')}")
    return lines


def _thread(thread: insight_pb2.Thread) -> list[str]:
    name = "main thread" if thread.main else f"thread {_one_line(thread.name)}"
    functions = [_one_line(frame.function) for frame in thread.frames]
    width = min(max(map(cell_len, functions)), MOST_ALIGNED)
    lines = [name]
    for function, frame in zip(functions, thread.frames, strict=True):
        pad = " " * (width - cell_len(function))
        lines.append(f"  {function}{pad}  {_one_line(frame.file)}:{frame.line}")
    if thread.frames_left_out:
        lines.append(f"  … {counted(thread.frames_left_out, 'more frame', 'more frames')}")
    return lines


def _facts(own: insight_pb2.Report) -> str:
    """What a process says of itself beside its threads."""
    facts = []
    if own.HasField("since_arrival_ms"):
        facts.append(f"last arrived {duration(own.since_arrival_ms)} ago")
    else:
        facts.append("has not arrived anywhere yet")
    if own.cpu_over_ms:
        facts.append(f"used {duration(own.cpu_ms)} of processor time in {duration(own.cpu_over_ms)}")
    if own.resident_bytes:
        facts.append(f"{_size(own.resident_bytes)} resident")
    facts += map(_child, own.saves)
    return "; ".join(facts)


def _child(child: insight_pb2.ChildOfSave) -> str:
    state = STATES.get(child.state) or f"(state {_one_line(child.state) or 'unknown'})"
    return f"save child {child.pid} {state}"


# ---------------------------------------------------------------------- the silent


def _silent(crowd: insight_pb2.Crowd) -> str:
    members = sorted(crowd.members, key=lambda one: one.rank)
    if len(members) <= report.MOST_NAMED_SINGLY:
        who = ", ".join(map(_process, members))
    else:
        who = _ranks(one.rank for one in members)
    return f"{who}: {_one_line(crowd.line)}"


# ---------------------------------------------------------------------- words


def _who(members: Sequence[insight_pb2.Onlooked]) -> str:
    if len(members) == 1:
        return _process(members[0])
    ranks = {one.rank for one in members}
    if len(ranks) == len(members):
        return f"{len(ranks):,} ranks: {report.ranges(ranks)}"
    return f"{len(members):,} processes of {_ranks(ranks)}"


def _process(member: insight_pb2.Onlooked) -> str:
    if not member.host:
        return f"rank {member.rank}"
    return _one_line(report.process_name(member.rank, member.host, member.pid))


def _ranks(ranks: Iterable[int]) -> str:
    """Ranks by number; one that several processes speak for is named once."""
    named = set(ranks)
    return f"{'rank' if len(named) == 1 else 'ranks'} {report.ranges(named)}"


def _size(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def _one_line(text: str) -> str:
    """What someone sent: it must neither speak to the terminal nor begin a line of its own."""
    return report.printable(text).replace("\n", "\\n")
