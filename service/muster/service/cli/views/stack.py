"""``muster stack``: where the processes of a run stand."""

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
"""Ranks that can be named: as many as the list of a request may hold."""

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
    """Show where the processes of a run stand: functions, files and lines, never values.

    Ranks whose main threads stand at the same place are told as one, the most frequent first.
    """
    try:
        ranks = parse_ranks(rank or ())
    except ValueError as error:
        fail(str(error), Exit.USAGE)
    if missing == "":
        # The coordinator would take it for no wish at all, and ask everyone.
        fail("--missing is empty. Name the group's prefix, such as checkpoint.", Exit.USAGE)
    request = insight_pb2.StacksRequest(run_id=run, ranks=ranks, missing=missing or "")
    with connect(endpoint, timeout) as client:
        found = client.stacks(request)
    nobody = not (found.crowds or found.silent)
    if nobody:
        note(ignore_answer(request))
    if output is Output.JSON:
        emit(document(as_dict(found)))
    elif not nobody:
        emit("\n".join(stacks_lines(run, found)))


def parse_ranks(words: Iterable[str]) -> list[int]:
    """Ranks as people name them: ``3``, ``0-7``, ``3,5``, and any of these together.

    Returns:
        The ranks, ascending, each once.

    Raises:
        ValueError: one of them is none.
    """
    ranks: set[int] = set()
    for part in (part.strip() for word in words for part in word.split(",")):
        found = re.fullmatch("([0-9]{1,10})(?:-([0-9]{1,10}))?", part)
        if found is None:
            raise ValueError(
                f'"{report.shown(part)}" is no rank. Give numbers and ranges, such as 3, 0-7 or 3,5.'
            )
        first, last = int(found[1]), int(found[2] or found[1])
        if last > options.MAX_RANK:
            raise ValueError(f"{part}: no rank is greater than {options.MAX_RANK:,}.")
        if first > last:
            raise ValueError(f"{part}: this range ends before it begins. Give the smaller rank first.")
        # Before the numbers are made, of which there may be far more than memory.
        if last - first < MAX_RANKS:
            ranks.update(range(first, last + 1))
        if last - first >= MAX_RANKS or len(ranks) > MAX_RANKS:
            raise ValueError(f"{part}: these are more than {MAX_RANKS:,} ranks. Leave them out to ask all.")
    return sorted(ranks)


def ignore_answer(request: insight_pb2.StacksRequest) -> str:
    """Why there is nothing to show."""
    run, prefix = request.run_id, request.missing
    if not prefix:
        return f"no process of run {run} is there to be asked"
    barrier = f'the open barrier "{prefix}" of run {run}'
    if request.ranks:
        return f"{barrier} waits for none of these ranks"
    return (
        f"{barrier} waits for no process that could be asked\n"
        f"  next: {report.command('describe barrier', run, prefix)}"
    )
