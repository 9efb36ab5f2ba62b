"""The stacks of a run's processes, as lines for people."""

from rich.cells import cell_len

from muster.service.cli.views.table import counted
from muster.service.core.vocabulary import report
from muster.service.insight import words
from muster.v1 import insight_pb2

MAX_ALIGNED = 40
"""Cells of the column of functions. A longer name shifts the file behind it."""


def stacks_lines(run_id: str, response: insight_pb2.StacksResponse) -> list[str]:
    """List how many answered, the ranks that differ from most, each crowd, and the silent processes."""
    answered, asked = words.answered(response)
    processes = counted(asked, "process", "processes")
    lines = [_one_line(f"run {run_id}: {answered:,} of {processes} answered")]
    if others := words.differing(response):
        lines.append(words.differ(others))
    for crowd in response.crowds:
        lines += ["", *_crowd(crowd)]
    if response.silent:
        lines += ["", *map(_silent, response.silent)]
    return lines


# ---------------------------------------------------------------------- crowds


def _crowd(crowd: insight_pb2.Crowd) -> list[str]:
    own = words.alone(crowd)
    lines = [_one_line(words.crowd(crowd.members))]
    if crowd.line:
        lines.append(f"  {_one_line(crowd.line)}")
    if own is not None:
        lines.append(f"  {_one_line(words.facts(own))}")
    for thread in crowd.threads:
        if thread.frames:  # The line says if the main thread has ended.
            lines += (f"  {line}" for line in _thread(thread))
    if own is not None and own.threads_left_out:
        lines.append(f"  … {counted(own.threads_left_out, 'more thread', 'more threads')}")
    return lines


def _thread(thread: insight_pb2.Thread) -> list[str]:
    name = "main thread" if thread.main else f"thread {_one_line(thread.name)}"
    functions = [_one_line(frame.function) for frame in thread.frames]
    width = min(max(map(cell_len, functions)), MAX_ALIGNED)
    lines = [name]
    for function, frame in zip(functions, thread.frames, strict=True):
        pad = " " * (width - cell_len(function))
        lines.append(f"  {function}{pad}  {_one_line(frame.file)}:{frame.line}")
    if thread.frames_left_out:
        lines.append(f"  … {counted(thread.frames_left_out, 'more frame', 'more frames')}")
    return lines


# ---------------------------------------------------------------------- the silent


def _silent(crowd: insight_pb2.Crowd) -> str:
    return f"{_one_line(words.singly(crowd.members))}: {_one_line(crowd.line)}"


def _one_line(text: str) -> str:
    """Return text from outside on one line, without control characters for the terminal."""
    return report.printable(text).replace("\n", "\\n")
