"""Output on stdout: aligned columns, labelled fields, or JSON."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import typer
from google.protobuf.descriptor import EnumDescriptor
from rich.cells import cell_len, set_cell_size

from muster.service.cli.failure import Exit
from muster.service.core.vocabulary import report

Row = TypeVar("Row")

GAP = "   "
MIN_ROOM = 12
"""Cells that the last column has on the narrowest terminal."""

COLORS = {
    "OPEN": "cyan",
    "FORMING": "cyan",
    "COMPLETE": "green",
    "RELEASED": "green",
    "CONNECTED": "green",
    "DISCONNECTED": "yellow",
    "IDLE": "yellow",
    "COMMITTED": "green",
    "VERIFIED": "green",
    "REPLICATED": "green",
    "PERSISTED": "green",
    "UNVERIFIED": "yellow",
    "DAMAGED": "red",
    "UNREADABLE": "red",
    "TIMED_OUT": "red",
    "ABORTED": "red",
    "MEMBER_LOST": "red",
    "MISMATCHED": "red",
    "LOST": "red",
    "EVICTED": "red",
    "CLOSED": "magenta",
}
"""The colours of states, on a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(Generic[Row]):
    """One column of a table."""

    title: str
    cell: Callable[[Row], str]
    wide: bool = False
    """Whether only ``-o wide`` shows it."""
    state: bool = False
    """Whether it holds states, which have colours."""


class Table(Generic[Row]):
    """Rows in aligned columns, printed together or one batch after another.

    Args:
        columns: the columns.
        wide: whether to show the wide columns as well.
        color: whether to colour states.
        cut_at: width in cells at which the last column is cut; None cuts nothing.
    """

    def __init__(
        self,
        columns: Sequence[Column[Row]],
        *,
        wide: bool = False,
        color: bool = False,
        cut_at: int | None = None,
    ) -> None:
        self._columns = [column for column in columns if wide or not column.wide]
        self._widths = [0] * len(self._columns)
        self._color = color
        self._cut_at = cut_at
        self._begun = False

    def text(self, rows: Iterable[Row]) -> str:
        """Return the lines of these rows. The first call adds the header.

        Columns keep the width of an earlier call, or grow.
        """
        lines = [[_line(column.cell(row)) for column in self._columns] for row in rows]
        if not self._begun:
            self._begun = True
            lines.insert(0, [column.title for column in self._columns])
        for index in range(len(self._columns)):
            self._widths[index] = max(self._widths[index], *(cell_len(line[index]) for line in lines), 0)
        return "\n".join(map(self._join, lines))

    def _join(self, cells: list[str]) -> str:
        if self._cut_at is not None:
            room = max(MIN_ROOM, self._cut_at - sum(width + len(GAP) for width in self._widths[:-1]))
            if cell_len(cells[-1]) > room:
                cells[-1] = set_cell_size(cells[-1], room - 1) + "…"
        padded = []
        for column, width, cell in zip(self._columns, self._widths, cells, strict=True):
            pad = " " * (width - cell_len(cell))
            if self._color and column.state and cell in COLORS:
                cell = typer.style(cell, fg=COLORS[cell])
            padded.append(cell + pad)
        return GAP.join(padded).rstrip()


def fields(pairs: Mapping[str, str]) -> str:
    """Format labels and values, one line each."""
    width = max(map(len, pairs)) + 1
    return "\n".join(f"{label + ':':<{width}}  {_line(value)}" for label, value in pairs.items())


def indented(text: str) -> str:
    """Return the text, indented."""
    return "\n".join(f"  {line}" for line in report.printable(text).splitlines())


def headed(headline: str, lines: Iterable[str]) -> str:
    """Format a sentence with indented lines below it."""
    return "\n".join([report.printable(headline).replace("\n", "\n    "), *map(indented, lines)])


def _line(value: str) -> str:
    return report.printable(value).replace("\n", "\\n")


# ---------------------------------------------------------------------- cells


def name(enum: EnumDescriptor, value: int, prefix: str = "") -> str:
    """Return the name of an enum's value, without the enum's own name.

    A newer coordinator may send a value that this version does not know; it is shown as its number.
    """
    known = enum.values_by_number.get(value)
    return str(known.name).removeprefix(prefix) if known is not None else str(value)


def counted(count: int, one: str, many: str) -> str:
    """Format a count: ``1 node``, ``4 nodes``."""
    return f"{count:,} {one if count == 1 else many}"


# ---------------------------------------------------------------------- out


def document(value: Mapping[str, Any]) -> str:
    """Format a JSON document, for people and jq."""
    return json.dumps(value, indent=2)


def json_line(value: Mapping[str, Any]) -> str:
    """Format a JSON document on one line."""
    return json.dumps(value)


def colorful() -> bool:
    """Return whether stdout should have colours (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def terminal_width() -> int | None:
    """Return the width of stdout's terminal; None if stdout is not a terminal, so that a pipe gets all."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def emit(text: str) -> None:
    """Print data on stdout. If the reader, such as ``head``, closes the pipe, end the command quietly."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        # The interpreter flushes its buffer at exit, which would fail on the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(Exit.DONE) from None


def note(text: str) -> None:
    """Print a message on stderr."""
    typer.echo(report.printable(text), err=True)
