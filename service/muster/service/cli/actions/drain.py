"""``muster drain``: every run on a node saves, stops, and so leaves the node."""

import time
from typing import Annotated

import typer

from muster.service.cli import options
from muster.service.cli.actions.save import Deadline, Wait
from muster.service.cli.actions.waiting import WaitError, wait_for_save
from muster.service.cli.client.caller import caller
from muster.service.cli.client.coordinator_client import Client, connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.failure import fail
from muster.service.cli.options import Output
from muster.service.cli.views.table import document, emit
from muster.service.core.vocabulary import report
from muster.service.formatting.requested_saves import save_text
from muster.service.wire import as_dict, milliseconds
from muster.v1 import run_pb2

NodeName = Annotated[
    str,
    typer.Argument(
        callback=options.text, metavar="NODE", help="The node, as its scheduler names it.", show_default=False
    ),
]


@connecting
def drain(
    node: NodeName,
    deadline: Deadline = 0.0,
    reason: options.Reason = "",
    wait: Wait = 0.0,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Ask every run on a node to save at one step and to stop, so that its scheduler starts it elsewhere.

    Cordon the node first, or the scheduler may start the runs on it again. A run with a node that stands by
    can go on without a stop: muster replace.
    """
    request = run_pb2.DrainNodeRequest(
        node_name=node,
        stop=True,
        by=caller(),
        reason=reason or f"node {node} is drained",
        deadline_ms=milliseconds(deadline),
    )
    with connect(endpoint, timeout) as client:
        drained = client.drain_node(request)
        if wait:
            _wait_for_all(client, drained, wait)
    emit(document(as_dict(drained)) if output is Output.JSON else drained_text(node, drained))


def drained_text(node: str, drained: run_pb2.DrainNodeResponse) -> str:
    """Describe what each run on the node was asked for."""
    if not drained.runs:
        return (
            f"no run has a process or an agent on node {report.shown(node)}, so nothing was asked for\n"
            "  next: the nodes of a run are in: muster get members RUN -o wide"
        )
    return "\n".join(f"run {one.run_id}: {save_text(one.save)}" for one in drained.runs)


def _wait_for_all(client: Client, drained: run_pb2.DrainNodeResponse, wait: float) -> None:
    """Wait until all runs have saved, and update them. If one has not, end the command after all others."""
    end = time.monotonic() + wait
    failed: list[WaitError] = []
    for one in drained.runs:
        try:
            one.save.CopyFrom(wait_for_save(client, one.run_id, end, report.seconds(wait)))
        except WaitError as error:
            failed.append(error)
    if failed:
        fail("\n".join(error.message for error in failed), failed[0].code)
