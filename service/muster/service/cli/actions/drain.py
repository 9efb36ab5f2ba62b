"""``muster drain``: every run on a node saves, stops, and so leaves the node."""

import time
from typing import Annotated

import typer

from muster.service.cli import options
from muster.service.cli.actions.save import Deadline, Wait
from muster.service.cli.actions.waiting import WaitError, deadline_ms, wait_for_save
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

    All nodes of these runs stop. To replace one node of a run, and train on: muster replace. The command
    asks once, for the runs on the node now. Cordon the node first, or the scheduler may start runs there.
    """
    request = run_pb2.DrainNodeRequest(
        node_name=node,
        stop=True,
        by=caller(),
        reason=reason or f"node {node} is drained",
        deadline_ms=deadline_ms(deadline),
    )
    failed: list[WaitError] = []
    with connect(endpoint, timeout) as client:
        drained = client.drain_node(request)
        if wait:
            failed = _wait_for_all(client, drained, wait)
    emit(document(as_dict(drained)) if output is Output.JSON else drained_text(node, drained))
    if failed:
        # A timeout first: such a run may still save.
        code = Exit.TIMED_OUT if any(one.code is Exit.TIMED_OUT for one in failed) else failed[0].code
        fail("\n".join(one.message for one in failed), code)


def drained_text(node: str, drained: run_pb2.DrainNodeResponse) -> str:
    """Describe the request that each run on the node has."""
    if not drained.runs:
        return (
            f"no run has a process on node {report.shown(node)}, or an agent in a complete round. "
            "Nothing was asked for.\n"
            "  next: check the node's name, under NODE NAME of: muster get members RUN -o wide"
        )
    return "\n".join(f"run {one.run_id}: {save_text(one.save)}" for one in drained.runs)


def _wait_for_all(client: Client, drained: run_pb2.DrainNodeResponse, wait: float) -> list[WaitError]:
    """Wait until all runs have saved, and update them. Returns the errors of those that have not."""
    end = time.monotonic() + wait
    failed: list[WaitError] = []
    for one in drained.runs:
        try:
            save = wait_for_save(client, one.run_id, end, report.seconds(wait), stop=True)
            one.save.CopyFrom(save)
        except WaitError as error:
            failed.append(error)
    return failed
