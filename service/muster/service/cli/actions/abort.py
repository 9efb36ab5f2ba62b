"""``muster abort``: end an open barrier for everyone."""

from typing import Annotated

import typer

from muster.service.cli import options
from muster.service.cli.client.coordinator_client import Client, connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.failure import Exit, fail
from muster.service.cli.options import Output
from muster.service.cli.views.table import document, emit
from muster.service.core.vocabulary import report
from muster.service.wire import as_dict

Sequence = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=2**64 - 1,
        metavar="N",
        help="Abort only this barrier; fail if another one is open.",
        show_default=False,
    ),
]


@connecting
def abort(
    run: options.Run,
    prefix: options.Prefix,
    sequence: Sequence = None,
    reason: options.Reason = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the barrier that would be aborted, and do nothing.")
    ] = False,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Abort a group's open barrier.

    All ranks that wait at it fail now, with the reason. Ranks that arrive later get the same error.
    """
    with connect(endpoint, timeout) as client:
        if dry_run:
            _show(client, run, prefix, sequence, output)
            return
        done = client.abort(run, prefix, reason, sequence)
        if output is Output.JSON:
            emit(document(as_dict(done)))
        else:
            emit(report.printable(done.decision.message))


def _show(client: Client, run: str, prefix: str, sequence: int | None, output: Output) -> None:
    found = client.barrier(run, prefix, sequence)
    message = report.printable(found.barrier.message)
    if found.barrier.HasField("decision"):
        fail(f"nothing to abort: {message}", Exit.CLOSED)
    if output is Output.JSON:
        emit(document(as_dict(found)))
    else:
        emit(f"would abort: {message}")
