"""``muster save``: ask all ranks of a run to save at one step, or withdraw the request."""

import time
from typing import Annotated

import typer

from muster.service.cli import options
from muster.service.cli.client.caller import caller
from muster.service.cli.client.coordinator_client import Client, connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.failure import Exit, fail
from muster.service.cli.options import Output
from muster.service.cli.views.table import document, emit
from muster.service.core.vocabulary import report
from muster.service.formatting.requested_saves import save_text
from muster.service.wire import as_dict
from muster.v1 import run_pb2

POLL_INTERVAL = 0.5
"""Seconds between two polls of whether the save is done."""

Stop = Annotated[bool, typer.Option("--stop", help="End training after the save.")]
AcrossGenerations = Annotated[
    bool,
    typer.Option(
        "--across-generations",
        help="With --stop: keep the request if the job restarts first; otherwise it lapses then.",
    ),
]
Cancel = Annotated[bool, typer.Option("--cancel", help="Withdraw the request.")]
Wait = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="Wait up to so long for all ranks to finish; exit code 4 otherwise.  [default: not at all]",
        show_default=False,
    ),
]


@connecting
def save(
    run: options.Run,
    stop: Stop = False,
    across_generations: AcrossGenerations = False,
    cancel: Cancel = False,
    reason: options.Reason = "",
    wait: Wait = 0.0,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Ask all ranks to save at one step that they agree on.

    Their training loops must have a SavePoint. The request is kept until all have saved.
    """
    if cancel and (stop or wait):
        fail("--cancel withdraws the request: give neither --stop nor --wait with it", Exit.USAGE)
    if across_generations and not stop:
        fail("--across-generations is for a request with --stop; any other is kept anyway", Exit.USAGE)
    with connect(endpoint, timeout) as client:
        if cancel:
            asked = client.cancel_save(run_pb2.CancelSaveRequest(run_id=run, reason=reason)).save
        else:
            request = run_pb2.RequestSaveRequest(
                run_id=run, stop=stop, by=caller(), reason=reason, across_generations=across_generations
            )
            asked = client.request_save(request).save
            if wait:
                asked = _wait_for(client, run, wait)
    emit(document(as_dict(asked)) if output is Output.JSON else f"run {run}: {save_text(asked)}")


def _wait_for(client: Client, run: str, wait: float) -> run_pb2.Save:
    """Return the save when all ranks are done. If they are not in time, end the command."""
    deadline = time.monotonic() + wait
    while True:
        now = client.run(run).run.save
        # If a newer request has replaced this one, wait for that.
        if now.state == run_pb2.SAVE_STATE_DONE:
            return now
        if now.state in (run_pb2.SAVE_STATE_WITHDRAWN, run_pb2.SAVE_STATE_LAPSED):
            fail(f"run {run}: {save_text(now)}", Exit.CLOSED)
        if time.monotonic() >= deadline:
            fail(
                f"run {run}: {save_text(now)}, and not done within {report.seconds(wait)}\n"
                f"  next: {report.command('stack', run)}",
                Exit.TIMED_OUT,
            )
        time.sleep(POLL_INTERVAL)
