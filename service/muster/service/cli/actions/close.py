"""``muster close``: end the membership of a run permanently."""

from typing import Annotated

import typer

from muster.service.cli import options
from muster.service.cli.client.caller import caller
from muster.service.cli.client.coordinator_client import connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.failure import Exit, fail
from muster.service.cli.options import Output
from muster.service.cli.views.table import counted, document, emit, headed
from muster.service.core.vocabulary import report
from muster.service.wire import as_dict, closed_from_pb, node_from_pb
from muster.v1 import rendezvous_pb2

AbortBarriers = Annotated[
    bool,
    typer.Option(
        "--abort-barriers", help="Also end open barriers; otherwise a last checkpoint may still commit."
    ),
]


@connecting
def close(
    run: options.Run,
    abort_barriers: AbortBarriers = False,
    reason: options.Reason = "",
    dry_run: options.DryRun = False,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Close a run permanently: its nodes and ranks are told, and new ones are refused.

    Only the first close counts. Closing again can only end barriers that are still open.
    """
    request = rendezvous_pb2.CloseRequest(
        run_id=run,
        by=caller(),
        reason=reason,
        abort_barriers=abort_barriers,
        dry_run=dry_run,
        even_if_stopped=True,
    )
    with connect(endpoint, timeout) as client:
        done = client.close_run(request)
    if done.was_closed and not (abort_barriers and done.open_barriers):
        fail(f"nothing to close: {report.run_closed(run, closed_from_pb(done.closed))}", Exit.CLOSED)
    emit(document(as_dict(done)) if output is Output.JSON else closing_text(request, done))


def closing_text(request: rendezvous_pb2.CloseRequest, done: rendezvous_pb2.CloseResponse) -> str:
    """Describe what the close affects, or would affect."""
    run, would = request.run_id, request.dry_run
    if done.HasField("closed"):
        headline = report.run_closed(run, closed_from_pb(done.closed))
        if would:
            headline = f"would only end barriers: {headline}"
    else:
        headline = f"would close run {run}"
    lines = []
    if waiting := done.waiting_nodes:
        names = report.node_names([node_from_pb(node) for node in waiting])
        ends = "ends" if would else "ended"
        lines.append(f"the wait of {counted(len(waiting), 'node', 'nodes')} {ends}: {names}")
    # A second close tells nobody again.
    if not done.was_closed:
        lines += _told(done.nodes_in_round, "node in the round", "nodes in the round", would)
        lines += _told(done.connected_processes, "connected process", "connected processes", would)
    ended = f"{'is' if would else 'was'} aborted" if request.abort_barriers else "goes on"
    lines += [f"{report.barrier_name(run, one.prefix, one.sequence)} {ended}" for one in done.open_barriers]
    return headed(headline, lines or ["nobody is there to be told"])


def _told(count: int, one: str, many: str, would: bool) -> list[str]:
    if not count:
        return []
    if count == 1:
        return [f"1 {one} {'is' if would else 'was'} told, and goes on"]
    return [f"{count:,} {many} {'are' if would else 'were'} told, and go on"]
