"""The arguments and options that sub-commands share."""

import enum
import math
from typing import Annotated

import typer


class Output(enum.StrEnum):
    """How data is printed."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"


def finite(value: float) -> float:
    """Refuse a length of time that is not finite."""
    if not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a length of time.")
    return value


def text(value: str | None) -> str | None:
    """Refuse text that is not UTF-8: its bytes arrive as lone surrogates, which cannot be sent."""
    if value is not None and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise typer.BadParameter("it is not valid UTF-8.") from None
    return value


DEFAULT_ENDPOINT = "127.0.0.1:7550"
DEFAULT_TIMEOUT = 10.0
DEFAULT_INTERVAL = 2.0
MAX_RANK = 2**31 - 1

Run = Annotated[str, typer.Argument(callback=text, metavar="RUN", help="The run's id.", show_default=False)]
OptionalRun = Annotated[
    str,
    typer.Argument(
        callback=text, metavar="RUN", help="Only the run of this id; default: all.", show_default=False
    ),
]
Prefix = Annotated[
    str,
    typer.Argument(
        callback=text, metavar="PREFIX", help="The group's prefix, such as checkpoint.", show_default=False
    ),
]
Rank = Annotated[
    int, typer.Argument(min=0, max=MAX_RANK, metavar="RANK", help="The rank.", show_default=False)
]
Node = Annotated[
    str,
    typer.Argument(
        callback=text,
        metavar="NODE",
        help="The node's name, or the address of its agents.",
        show_default=False,
    ),
]
Missing = Annotated[
    str | None,
    typer.Option(
        callback=text,
        metavar="PREFIX",
        help="Only the ranks that the open barrier of this group waits for.",
        show_default=False,
    ),
]
Reason = Annotated[
    str,
    typer.Option(
        callback=text,
        metavar="TEXT",
        help="The reason, for the ranks and people that are told.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be affected, and do nothing.")]
Endpoint = Annotated[
    str,
    typer.Option(
        "--endpoint",
        "-e",
        envvar="MUSTER_ENDPOINT",
        metavar="HOST:PORT",
        help="The coordinator's address, or those of its replicas with commas between.",
    ),
]
Timeout = Annotated[
    float,
    typer.Option(
        min=0.001,
        callback=finite,
        metavar="SECONDS",
        help="How long the coordinator may take to answer, all replicas together.",
    ),
]
Format = Annotated[Output, typer.Option("--output", "-o", help="How to print it.")]
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Keep printing what changes; Ctrl-C ends.")]
Interval = Annotated[
    float,
    typer.Option(min=0.1, callback=finite, metavar="SECONDS", help="Time between two polls."),
]
