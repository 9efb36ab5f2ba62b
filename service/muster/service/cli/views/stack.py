"""``muster stack``: shows the stacks of a run's processes."""

import re
from collections.abc import Iterable
from typing import Annotated

import typer

from muster.service.cli import options
from muster.service.cli.client.coordinator_client import connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.failure import Exit, fail
from muster.service.cli.options import Output
from muster.service.cli.views.stacks import stacks_lines
from muster.service.cli.views.table import document, emit, note
from muster.service.core.vocabulary import report
from muster.service.wire import as_dict
from muster.v1 import insight_pb2

MAX_RANKS = 65_536
"""Ranks that a request may name."""

Ranks = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RANK", help="Only these ranks, such as 3, 0-7 or 3,5; default: all.", show_default=False
    ),
]


@connecting
def stack(
    run: options.Run,
    rank: Ranks = None,
    missing: options.Missing = None,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Show the stacks of a run's processes: functions, files and lines, never values.

    Ranks with their main threads at the same place are shown together, the most frequent place first.
    """
    try:
        ranks = parse_ranks(rank or ())
    except ValueError as error:
        fail(str(error), Exit.USAGE)
    if missing == "":
        # The coordinator would ask all ranks.
        fail("--missing is empty. Name the group's prefix, such as checkpoint.", Exit.USAGE)
    request = insight_pb2.StacksRequest(run_id=run, ranks=ranks, missing=missing or "")
    with connect(endpoint, timeout) as client:
        found = client.stacks(request)
    nobody = not (found.crowds or found.silent)
    if nobody:
        note(nobody_asked(request))
    if output is Output.JSON:
        emit(document(as_dict(found)))
    elif not nobody:
        emit("\n".join(stacks_lines(run, found)))


def parse_ranks(words: Iterable[str]) -> list[int]:
    """Parse ranks as people name them: ``3``, ``0-7``, ``3,5``, and any of these together.

    Returns:
        The ranks, ascending, each once.

    Raises:
        ValueError: a part is not a rank or a range.
    """
    ranks: set[int] = set()
    for part in (part.strip() for word in words for part in word.split(",")):
        found = re.fullmatch("([0-9]{1,10})(?:-([0-9]{1,10}))?", part)
        if found is None:
            raise ValueError(
                f'"{report.shown(part)}" is not a rank. Give numbers and ranges, such as 3, 0-7 or 3,5.'
            )
        first, last = int(found[1]), int(found[2] or found[1])
        if last > options.MAX_RANK:
            raise ValueError(f"{part}: no rank is greater than {options.MAX_RANK:,}.")
        if first > last:
            raise ValueError(f"{part}: this range ends before it begins. Give the smaller rank first.")
        # Checked first: the range may have more numbers than fit in memory.
        if last - first < MAX_RANKS:
            ranks.update(range(first, last + 1))
        if last - first >= MAX_RANKS or len(ranks) > MAX_RANKS:
            raise ValueError(f"{part}: these are more than {MAX_RANKS:,} ranks. Leave them out to ask all.")
    return sorted(ranks)


def nobody_asked(request: insight_pb2.StacksRequest) -> str:
    """Return why no process was asked."""
    run, prefix = request.run_id, request.missing
    if not prefix:
        return f"no process of run {run} can be asked"
    barrier = f'the open barrier "{prefix}" of run {run}'
    if request.ranks:
        return f"{barrier} waits for none of these ranks"
    return (
        f"{barrier} waits for no process that could be asked\n"
        f"  next: {report.command('describe barrier', run, prefix)}"
    )
