"""``muster forget``: remove a run, so that its id can be used again."""

from typing import Annotated

import typer

from muster.service.cli import options
from muster.service.cli.client.coordinator_client import connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.options import Output
from muster.service.cli.views.table import counted, document, emit, headed
from muster.service.core.vocabulary import report
from muster.service.wire import as_dict
from muster.v1 import run_pb2

Force = Annotated[
    bool,
    typer.Option("--force", help="Even if the run is in use: its streams and waiting calls end."),
]


@connecting
def forget(
    run: options.Run,
    force: Force = False,
    dry_run: options.DryRun = False,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Remove a run with all its state: sequences, decisions, rounds, the closed state, keys.

    Its id can be used again immediately. The coordinator refuses while the run is in use.
    """
    request = run_pb2.ForgetRequest(run_id=run, force=force, dry_run=dry_run)
    with connect(endpoint, timeout) as client:
        done = client.forget(request)
    emit(document(as_dict(done)) if output is Output.JSON else forgetting_text(request, done))


def forgetting_text(request: run_pb2.ForgetRequest, done: run_pb2.ForgetResponse) -> str:
    """Describe what the removal affects, or would affect."""
    headline = f"would forget run {request.run_id}"
    if not request.dry_run:
        headline = report.forgotten_on_demand(request.run_id)
    affected = (
        ("sent away", done.processes, "process", "processes"),
        ("without a place", done.nodes, "node", "nodes"),
        ("refused", done.waiting_calls, "call that waits for its keys", "calls that wait for its keys"),
    )
    lines = [f"{what}: {counted(count, one, many)}" for what, count, one, many in affected if count]
    lines += [
        f"without an outcome: {report.barrier_name(request.run_id, one.prefix, one.sequence)}"
        for one in done.open_barriers
    ]
    return headed(headline, lines or ["nobody used it"])
