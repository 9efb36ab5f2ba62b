"""Text about what processes are doing: for the command, the status page and the reports of missing ranks."""

from collections.abc import Iterable, Sequence

from muster.service.core.vocabulary import report
from muster.service.formatting.cells import duration
from muster.v1.insight_pb2 import ChildOfSave, Crowd, Frame, ProbedProcess, Report, StacksResponse, Thread

NO_ANSWER = "does not answer: it is stopped, or something holds its interpreter's lock, or its host is silent"
DECLINED = "does not say what it is doing (MUSTER_INSPECT)"
NO_SESSION = "has no session over which it could be asked"
TOO_LARGE = "gave an answer that is too large"

MAX_WAITS = 3
"""Barriers that the text names for one process. Its threads may wait at more."""
WRAPPERS = frozenset(
    {"wrapper", "wrapped", "inner", "decorated", "_fn", "__call__", "_call_impl", "_wrapped_call_impl"}
)
"""Names of wrapper functions that tell the reader nothing."""


def line(said: Report) -> str:
    """Describe a report in one line: ``main thread in all_reduce, train.py:214, for 41 s``.

    Args:
        said: the report of the process. Names in it are untrusted, so they are made printable.
    """
    parts = [place(main_of(said))]
    if said.still_ms:
        parts.append(f"for {report.seconds(said.still_ms / 1000)}")
    if said.waits_at:
        parts.append(f"waits at {' and '.join(map(report.shown, said.waits_at[:MAX_WAITS]))}")
    parts += [f"saves in pid {one.pid}{_state(one.state)}" for one in said.saves[:1]]
    return ", ".join(parts)


def main_of(said: Report) -> Thread | None:
    """Return the main thread; None if the report has no main thread."""
    return next((thread for thread in said.threads if thread.main), None)


def place(main: Thread | None) -> str:
    """Describe where a main thread stands: the function that the program called, and the line of the call."""
    if main is None:
        return "tells of no main thread"
    if not main.frames:
        return "main thread has ended"
    position = next((n for n, frame in enumerate(main.frames) if not frame.library), None)
    if position is None:
        return f"main thread in {_function(main.frames[0])}, {_at(main.frames[0])}"
    called = [frame for frame in main.frames[:position] if _short(frame) not in WRAPPERS]
    inside = called[-1] if called else main.frames[position]
    return f"main thread in {_function(inside)}, {_at(main.frames[position])}"


def _short(frame: Frame) -> str:
    return frame.function.rpartition(".")[2]


def _function(frame: Frame) -> str:
    return report.shown(_short(frame) or "?")


def _at(frame: Frame) -> str:
    return f"{report.shown(frame.file.rpartition('/')[2])}:{frame.line}"


STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "waits for the disk",
    "T": "is stopped",
    "t": "is stopped by a debugger",
    "Z": "has ended",
}
"""Process states by Linux's letter."""


def _state(letter: str) -> str:
    words = STATES.get(letter)
    return f", which {words}" if words else ""


# ---------------------------------------------------------------------- in full
# The caller must make these printable: names in them are as they were sent.


def facts(own: Report) -> str:
    """Describe what a report says beside the threads."""
    parts = []
    if own.HasField("since_arrival_ms"):
        parts.append(f"last arrived {duration(own.since_arrival_ms)} ago")
    else:
        parts.append("has not arrived anywhere yet")
    if own.cpu_over_ms:
        parts.append(f"used {duration(own.cpu_ms)} of processor time in {duration(own.cpu_over_ms)}")
    if own.resident_bytes:
        parts.append(f"{_size(own.resident_bytes)} resident")
    parts += map(_child, own.saves)
    return "; ".join(parts)


def answered(stacks: StacksResponse) -> tuple[int, int]:
    """Return how many processes answered, and how many were asked."""
    heard = sum(len(crowd.members) for crowd in stacks.crowds)
    return heard, heard + sum(len(crowd.members) for crowd in stacks.silent)


def alone(crowd: Crowd) -> Report | None:
    """Return the report of a crowd's only member; None if there are several, or the member gave no answer."""
    first = crowd.members[0]
    return first.report if len(crowd.members) == 1 and first.HasField("report") else None


def differing(stacks: StacksResponse) -> list[ProbedProcess]:
    """Return the processes that stand elsewhere than the majority; empty if no place has a majority."""
    heard, _ = answered(stacks)
    if not stacks.crowds or 2 * len(stacks.crowds[0].members) <= heard:
        return []
    return [member for crowd in stacks.crowds[1:] for member in crowd.members]


def differ(members: Sequence[ProbedProcess]) -> str:
    """Say that these processes differ from the majority."""
    return f"{len(members):,} {'differs' if len(members) == 1 else 'differ'} from the crowd: {ranks(members)}"


def crowd(members: Sequence[ProbedProcess]) -> str:
    """Name the processes that stand at one place."""
    if len(members) == 1:
        return _process(members[0])
    numbers = {one.rank for one in members}
    if len(numbers) == len(members):
        return f"{len(members):,} ranks: {report.ranges(numbers)}"
    return f"{len(members):,} processes of {ranks(members)}"


def singly(members: Sequence[ProbedProcess]) -> str:
    """Name processes one by one if they are few, and by rank otherwise."""
    if len(members) > report.MAX_NAMED_SINGLY:
        return ranks(members)
    return ", ".join(map(_process, sorted(members, key=lambda one: one.rank)))


def ranks(members: Iterable[ProbedProcess]) -> str:
    """Name the ranks of processes, each rank once."""
    numbers = {one.rank for one in members}
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {report.ranges(numbers)}"


def _process(member: ProbedProcess) -> str:
    if not member.host:
        return f"rank {member.rank}"
    return report.process_name(member.rank, member.host, member.pid)


def _child(child: ChildOfSave) -> str:
    state = STATES.get(child.state) or f"(state {child.state or 'unknown'})"
    return f"save child {child.pid} {state}"


def _size(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"
