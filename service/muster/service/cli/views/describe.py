"""``muster describe``: all details of one run, barrier or member."""

import time
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeAlias, TypeVar

import typer

from muster.service.cli import options
from muster.service.cli.client.coordinator_client import connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.failure import Exit, fail
from muster.service.cli.options import Output
from muster.service.cli.views import columns
from muster.service.cli.views.table import Column, Table, colorful, document, emit, fields, indented
from muster.service.core.vocabulary import report
from muster.service.formatting.cells import NOTHING, duration, ranks, standstill
from muster.service.formatting.checkpoints import checkpoints_text
from muster.service.formatting.requested_saves import asked_text, save_text, time_left
from muster.service.formatting.rounds import current_state
from muster.service.wire import as_dict, missing_from_pb, node_from_pb
from muster.v1 import barrier_pb2, common_pb2, rendezvous_pb2, run_pb2

Row = TypeVar("Row")
Host: TypeAlias = tuple[str, str, str]
"""A host, its node's rank, and the state of the processes there."""

app = typer.Typer(help="Show all details of one run, barrier or member.", no_args_is_help=True)


@app.command("run")
@connecting
def describe_run(
    run: options.Run,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Show a run, its rendezvous, its members and its barriers."""
    with connect(endpoint, timeout) as client:
        found = client.run(run).run
        rendezvous = client.rendezvous(run).rendezvous
        members = client.members(run).members
        barriers = client.barriers(run, 1).barriers
    if output is Output.JSON:
        emit(
            document(
                {
                    "run": as_dict(found),
                    "rendezvous": as_dict(rendezvous),
                    "members": [as_dict(one) for one in members],
                    "barriers": [as_dict(one) for one in barriers],
                }
            )
        )
    else:
        emit(run_text(found, rendezvous, members, barriers, wide=output is Output.WIDE, color=colorful()))


@app.command("barrier")
@connecting
def describe_barrier(
    run: options.Run,
    prefix: options.Prefix,
    sequence: Annotated[
        int | None,
        typer.Argument(
            min=0,
            max=2**64 - 1,
            metavar="SEQUENCE",
            help="The barrier's number; default: the open one, or else the last one decided.",
            show_default=False,
        ),
    ] = None,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Show a barrier and its missing ranks."""
    with connect(endpoint, timeout) as client:
        found = client.barrier(run, prefix, sequence)
    if output is Output.JSON:
        emit(document(as_dict(found)))
    else:
        emit(barrier_text(found.barrier, wide=output is Output.WIDE, color=colorful()))


@app.command("member")
@connecting
def describe_member(
    run: options.Run,
    rank: options.Rank,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Show a rank, and the barriers that it is missing from."""
    with connect(endpoint, timeout) as client:
        known = client.members(run).members
        processes = [one for one in known if one.rank == rank]
        rendezvous = client.rendezvous(run).rendezvous
        barriers = client.barriers(run, 1).barriers
    missing_from = [barrier for barrier in barriers if any(one.rank == rank for one in barrier.missing)]
    if not processes and not missing_from:
        fail(
            f"rank {rank} of run {run} has not said hello in this generation, and no barrier misses it; "
            f"known are the ranks {ranks({one.rank for one in known})}\n"
            f"  next: {report.command('get members', run)}",
            Exit.FAILED,
        )
    if output is Output.JSON:
        emit(
            document(
                {
                    "run_id": run,
                    "rank": rank,
                    "members": [as_dict(one) for one in processes],
                    "nodes": [
                        as_dict(node)
                        for node in rendezvous.nodes
                        if node.HasField("rank") and node.rank in {one.node_rank for one in processes}
                    ],
                    "missing_from": [as_dict(one) for one in missing_from],
                }
            )
        )
    else:
        emit(member_text(run, rank, processes, rendezvous, missing_from))


# ---------------------------------------------------------------------- texts


def run_text(
    run: run_pb2.Run,
    rendezvous: rendezvous_pb2.Rendezvous,
    members: Sequence[run_pb2.Member],
    barriers: Sequence[barrier_pb2.Barrier],
    *,
    wide: bool = False,
    color: bool = False,
) -> str:
    """Describe a run for people."""
    hosts: dict[Host, list[int]] = {}
    for member in members:
        host = member.host, columns.member_node(member), columns.member_state(member)
        hosts.setdefault(host, []).append(member.rank)
    return _sections(
        fields(
            {
                "Run": run.run_id,
                "State": columns.run_state(run),
                "Generation": str(run.generation),
                "Connected": f"{run.connected} of {run.members} ranks seen",
                "Groups": str(run.groups),
                "Barriers": f"{run.open_barriers} open, {run.decided_barriers} decided",
                "Store": f"{run.store_keys:,} keys, {run.store_bytes:,} bytes",
                **_steps(run, members),
                **_checkpoint(run),
            }
        ),
        _closed(run.closed) if run.HasField("closed") else "",
        _stopped(run.stopped) if run.HasField("stopped") else "",
        _save(run.save) if run.HasField("save") else "",
        _table("Failed saves", columns.FAILED_SAVES, run.checkpoints.failures, color=color),
        _rendezvous(rendezvous) if rendezvous.max_nodes or rendezvous.rounds else "",
        _table("Nodes", columns.NODES, rendezvous.nodes, wide=wide, color=color),
        _table("Gone nodes", columns.DEPARTED, rendezvous.departed, wide=wide, color=color),
        _table("Members", HOSTS, sorted(hosts.items()), color=color),
        _table("Barriers", columns.BARRIERS, barriers, wide=wide, color=color),
    )


def _steps(run: run_pb2.Run, members: Iterable[run_pb2.Member]) -> dict[str, str]:
    """Describe the progress of training; nothing if no connected rank reports steps."""
    there = common_pb2.MEMBER_STATE_CONNECTED
    ages = [one.step_ms for one in members if one.state == there and one.HasField("step")]
    if not run.HasField("steps") or not ages:
        return {}
    steps = run.steps
    still = standstill(steps.lowest, steps.highest, steps.lowest_rank, min(ages) / 1000)
    return {"Steps": f"{columns.run_steps(run)}; {still}"}


def _checkpoint(run: run_pb2.Run) -> dict[str, str]:
    """Describe the newest checkpoint; nothing if no rank reported a save."""
    return {"Checkpoint": checkpoints_text(run.checkpoints)} if run.HasField("checkpoints") else {}


def _closed(closed: common_pb2.Closed) -> str:
    shown = {
        "By": closed.by,
        "Reason": closed.reason or NOTHING,
        "At": closed.closed_at.ToJsonString(),
    }
    return f"Closed:\n{indented(fields(shown))}"


def _stopped(stopped: common_pb2.Stopped) -> str:
    shown = {
        "Step": str(stopped.step),
        "By": stopped.by,
        "Reason": stopped.reason or NOTHING,
        "At": stopped.stopped_at.ToJsonString(),
        "Next": "start the job again under this run id; it resumes",
    }
    return f"Stopped:\n{indented(fields(shown))}"


def _save(save: run_pb2.Save) -> str:
    shown = {
        "State": save_text(save),
        "Asked by": asked_text(save),
        "At": save.asked_at.ToJsonString(),
    }
    if save.HasField("deadline"):
        left = time_left(save, time.time())
        shown["Deadline"] = f"{save.deadline.ToJsonString()}{f' ({left})' if left else ''}"
    if save.late:
        shown["Late"] = report.printable(save.late)
    return f"Save:\n{indented(fields(shown))}"


def _rendezvous(rendezvous: rendezvous_pb2.Rendezvous) -> str:
    shown = {
        "Round": str(rendezvous.round),
        "State": current_state(rendezvous),
    }
    if not rendezvous.HasField("closed"):
        # The message of a closed run repeats how it was closed.
        shown["Message"] = rendezvous.message
    return f"Rendezvous:\n{indented(fields(shown))}"


HOSTS: list[Column[tuple[Host, list[int]]]] = [
    Column(title="HOST", cell=lambda row: row[0][0]),
    Column(title="NODE", cell=lambda row: row[0][1]),
    Column(title="STATE", cell=lambda row: row[0][2], state=True),
    Column(title="RANKS", cell=lambda row: ranks(set(row[1]))),
]


def barrier_text(barrier: barrier_pb2.Barrier, *, wide: bool = False, color: bool = False) -> str:
    """Describe a barrier for people."""
    shown = {
        "Run": barrier.run_id,
        "Prefix": barrier.prefix,
        "Sequence": str(barrier.sequence),
        "Generation": str(barrier.generation),
        "State": columns.barrier_state(barrier),
        "Arrived": f"{barrier.arrived} of {barrier.required}",
    }
    if barrier.HasField("decision"):
        decision = barrier.decision
        shown["Decided"] = columns.decided_at(barrier)
        shown["Waited"] = duration(decision.wait_ms)
        if decision.HasField("last_arrival_rank"):
            shown["Last"] = f"rank {decision.last_arrival_rank}, {duration(decision.skew_ms)} after the first"
        if decision.payloads:
            shown["Payloads"] = f"{sum(len(one.data) for one in decision.payloads):,} bytes"
    else:
        shown["Waited"] = duration(barrier.age_ms)
        shown["Left"] = duration(barrier.remaining_ms)
    return _sections(
        fields(shown),
        f"Message:\n{indented(barrier.message)}",
        _table("Votes", VOTES, barrier.decision.failures),
        _table("Missing", columns.MISSING, barrier.missing, wide=wide, color=color),
    )


VOTES: list[Column[common_pb2.Failure]] = [
    Column(title="RANK", cell=lambda vote: str(vote.rank)),
    Column(title="HOST", cell=lambda vote: vote.host),
    Column(title="PID", cell=lambda vote: str(vote.pid)),
    Column(title="REASON", cell=lambda vote: vote.reason),
]


def member_text(
    run_id: str,
    rank: int,
    processes: Iterable[run_pb2.Member],
    rendezvous: rendezvous_pb2.Rendezvous,
    missing_from: Iterable[barrier_pb2.Barrier],
) -> str:
    """Describe a rank for people."""
    described = [
        fields(
            {
                "Process": f"{one.pid} on {one.host}",
                "Node": _node(one, rendezvous),
                "State": f"{columns.member_state(one)} for {duration(one.since_ms)}",
                "Last seen": "now" if _is_there(one) else f"{duration(one.since_ms)} ago",
                "Relay": one.relay or NOTHING,
                "Generation": str(one.generation),
                "Incarnation": f"{one.incarnation} (ordinal {one.ordinal})",
                "Groups": ", ".join(f"{group.prefix} #{columns.last_sequence(group)}" for group in one.groups)
                or NOTHING,
            }
        )
        for one in processes
    ]
    missed = [
        f"{report.barrier_name(barrier.run_id, barrier.prefix, barrier.sequence)} "
        f"({columns.barrier_state(barrier)}): {report.missing_one(missing_from_pb(one))}"
        for barrier in missing_from
        for one in barrier.missing
        if one.rank == rank
    ]
    return _sections(
        fields({"Run": run_id, "Rank": str(rank)}),
        *described,
        "Missing from:\n" + indented("\n".join(missed)) if missed else "",
    )


def _node(member: run_pb2.Member, rendezvous: rendezvous_pb2.Rendezvous) -> str:
    """Return the node of a process: its rank and, if it is in the round, its address."""
    for view in rendezvous.nodes:
        if member.HasField("node_rank") and view.HasField("rank") and view.rank == member.node_rank:
            return f"{member.node_rank}, {report.node_name(node_from_pb(view.node))}"
    return columns.member_node(member)


def _is_there(member: run_pb2.Member) -> bool:
    return member.state == common_pb2.MEMBER_STATE_CONNECTED


def _table(
    title: str, shown: Sequence[Column[Row]], rows: Sequence[Row], *, wide: bool = False, color: bool = False
) -> str:
    if not rows:
        return ""
    lines = Table(shown, wide=wide, color=color).text(rows).splitlines()
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])


def _sections(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)
