"""How the command fails: a sentence on stderr, and an exit code that scripts can tell apart."""

import enum
from typing import NoReturn

import typer

from muster.service.core.vocabulary import report


class Exit(enum.IntEnum):
    """The exit codes of every sub-command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    TIMED_OUT = 4
    CLOSED = 5
    """The run or barrier is closed or aborted already."""
    DAMAGED = 6
    """A checkpoint is not what was committed."""


def fail(message: str, code: Exit) -> NoReturn:
    """Print an error and end the command."""
    typer.echo(f"Error: {report.printable(message)}", err=True)
    raise typer.Exit(code)
