"""``muster evict``: send the processes of a rank away permanently."""

from muster.service.cli import options
from muster.service.cli.client.coordinator_client import connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.options import Output
from muster.service.cli.views.columns import member_state
from muster.service.cli.views.table import document, emit, headed
from muster.service.core.vocabulary import report
from muster.service.wire import as_dict
from muster.v1 import run_pb2


@connecting
def evict(
    run: options.Run,
    rank: options.Rank,
    reason: options.Reason = "",
    dry_run: options.DryRun = False,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Send the processes of a rank away.

    Open barriers that need the rank fail now. A new process of the rank may join.
    """
    request = run_pb2.EvictRequest(run_id=run, rank=rank, reason=reason, dry_run=dry_run)
    with connect(endpoint, timeout) as client:
        done = client.evict(request)
    emit(document(as_dict(done)) if output is Output.JSON else eviction_text(request, done))


def eviction_text(request: run_pb2.EvictRequest, done: run_pb2.EvictResponse) -> str:
    """Describe what the eviction affects, or would affect."""
    rank_name = f"rank {request.rank} of run {request.run_id}"
    if request.dry_run:
        headline, sent, needs = f"would evict {rank_name}", "is sent away", "needs it, and fails"
    else:
        headline, sent, needs = (
            f"{rank_name} was {report.evicted(request.reason)}",
            "was sent away",
            "needed it, and failed",
        )
    lines = [
        f"{report.process_name(one.rank, one.host, one.pid)}, {member_state(one).lower()}, {sent}"
        for one in done.members
    ]
    lines += [
        f"{report.barrier_name(request.run_id, one.prefix, one.sequence)} {needs}"
        for one in done.failed_barriers
    ]
    return headed(headline, lines)
