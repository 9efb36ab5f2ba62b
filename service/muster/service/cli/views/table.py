"""How data is put on stdout: aligned columns, labelled fields, or JSON."""

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
    """Rows in aligned columns, printed in one go or as they come.

    Args:
        columns: what to show of a row.
        wide: whether to show the wide columns too.
        color: whether states get their colours.
        cut_at: where the last column is cut, for a terminal of this width; None cuts nothing.
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
        """The lines of these rows; before the first of all, the header.

        Columns keep the width that they had at an earlier call, or grow.
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
    """Labels and values, a line each."""
    width = max(map(len, pairs)) + 1
    return "\n".join(f"{label + ':':<{width}}  {_line(value)}" for label, value in pairs.items())


def indented(text: str) -> str:
    """The text, moved in."""
    return "\n".join(f"  {line}" for line in report.printable(text).splitlines())


def headed(headline: str, lines: Iterable[str]) -> str:
    """A sentence, and what belongs to it moved in below."""
    return "\n".join([report.printable(headline).replace("\n", "\n    "), *map(indented, lines)])


def _line(value: str) -> str:
    return report.printable(value).replace("\n", "\\n")


# ---------------------------------------------------------------------- cells


def name(enum: EnumDescriptor, value: int, prefix: str = "") -> str:
    """The name of an enum's value, without the enum's own name.

    A newer coordinator may send a value that this version does not know; it is shown as its number.
    """
    known = enum.values_by_number.get(value)
    return str(known.name).removeprefix(prefix) if known is not None else str(value)


def counted(count: int, one: str, many: str) -> str:
    """``1 node``, ``4 nodes``."""
    return f"{count:,} {one if count == 1 else many}"


# ---------------------------------------------------------------------- out


def document(value: Mapping[str, Any]) -> str:
    """A JSON document for people and jq."""
    return json.dumps(value, indent=2)


def json_line(value: Mapping[str, Any]) -> str:
    """A JSON document on one line."""
    return json.dumps(value)


def colorful() -> bool:
    """Whether stdout wants colours (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def terminal_width() -> int | None:
    """How wide stdout's terminal is; None if it is none, so that a pipe gets everything."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def emit(text: str) -> None:
    """Print data on stdout; a reader who has seen enough, such as ``head``, ends the command quietly."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        # What is left in the buffer has to go somewhere when the interpreter flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(Exit.DONE) from None


def note(text: str) -> None:
    """Print a message on stderr."""
    typer.echo(report.printable(text), err=True)
