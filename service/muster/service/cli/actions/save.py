"""``muster save``: ask all ranks of a run to save at one step, or withdraw the request."""

import time
from typing import Annotated

import typer

from muster.service.cli import options
from muster.service.cli.actions.waiting import WaitError, deadline_ms, wait_for_save
from muster.service.cli.client.caller import caller
from muster.service.cli.client.coordinator_client import connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.failure import Exit, fail
from muster.service.cli.options import Output
from muster.service.cli.views.table import document, emit
from muster.service.core.vocabulary import report
from muster.service.formatting.requested_saves import save_text
from muster.service.wire import as_dict
from muster.v1 import run_pb2

Stop = Annotated[bool, typer.Option("--stop", help="End training after the save.")]
AcrossGenerations = Annotated[
    bool,
    typer.Option(
        "--across-generations",
        help="With --stop: keep the request if the job restarts first; otherwise it lapses then.",
    ),
]
Deadline = Annotated[
    float,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="Seconds from now until the save must be complete; 0: no deadline. The coordinator tells the "
        "ranks, and names those that are late.  [default: 0]",
        show_default=False,
    ),
]
Cancel = Annotated[
    bool, typer.Option("--cancel", help="Withdraw the pending request, with all that it covers.")
]
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
    deadline: Deadline = 0.0,
    cancel: Cancel = False,
    reason: options.Reason = "",
    wait: Wait = 0.0,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Ask all ranks to save at one step that they agree on.

    Their training loops must have a SavePoint. The coordinator keeps the request until all ranks have saved.
    """
    if cancel and (stop or wait or deadline):
        fail("--cancel withdraws the request: give no --stop, --wait or --deadline with it", Exit.USAGE)
    if across_generations and not stop:
        fail("--across-generations is for a request with --stop; any other is kept anyway", Exit.USAGE)
    with connect(endpoint, timeout) as client:
        if cancel:
            asked = client.cancel_save(run_pb2.CancelSaveRequest(run_id=run, reason=reason)).save
        else:
            request = run_pb2.RequestSaveRequest(
                run_id=run,
                stop=stop,
                by=caller(),
                reason=reason,
                across_generations=across_generations,
                deadline_ms=deadline_ms(deadline),
            )
            asked = client.request_save(request).save
            if wait:
                try:
                    asked = wait_for_save(
                        client, run, time.monotonic() + wait, report.seconds(wait), stop=stop
                    )
                except WaitError as error:
                    fail(error.message, error.code)
    emit(document(as_dict(asked)) if output is Output.JSON else f"run {run}: {save_text(asked)}")
