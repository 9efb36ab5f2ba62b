"""``muster get``: runs, barriers, members, rounds, local checkpoints, keepers and replicas, in lists."""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Annotated, TypeVar

import typer
from google.protobuf.message import Message

from muster.service.cli import options
from muster.service.cli.client.coordinator_client import CallError, Client, connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.options import Output
from muster.service.cli.views import columns
from muster.service.cli.views.table import (
    Column,
    Table,
    colorful,
    document,
    emit,
    json_line,
    note,
    terminal_width,
)
from muster.service.formatting.local_checkpoints import (
    CheckpointRow,
    KeeperRow,
    checkpoint_rows,
    keeper_rows,
    placement,
)
from muster.service.formatting.rounds import RoundRow, round_key, rounds_of
from muster.service.wire import as_dict
from muster.v1 import barrier_pb2, rendezvous_pb2, run_pb2

Row = TypeVar("Row")
MessageRow = TypeVar("MessageRow", bound=Message)

History = Annotated[
    int,
    typer.Option(min=1, max=1000, metavar="N", help="Decided barriers to show of each group, newest first."),
]

app = typer.Typer(
    help="List runs, barriers, members, rounds, local checkpoints, keepers or replicas.", no_args_is_help=True
)


@app.command()
@connecting
def runs(
    run: options.OptionalRun = "",
    output: options.Format = Output.TABLE,
    watch: options.Watch = False,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """List runs with counts of their ranks and barriers."""
    with connect(endpoint, timeout) as client:
        # A watch asks for the list too: its stream has no deadline, and cannot report an unknown run.
        found = run_pb2.RunServiceListResponse(runs=[client.run(run).run]) if run else client.runs()
        if not found.runs:
            note(f"no runs have said hello to {client.endpoint} yet")
        if watch:
            _print_each(([one] for one in client.watch_runs(run)), columns.RUNS, output)
        else:
            _print_all(found, found.runs, columns.RUNS, output)


@app.command()
@connecting
def barriers(
    run: options.OptionalRun = "",
    history: History = 1,
    output: options.Format = Output.TABLE,
    watch: options.Watch = False,
    interval: options.Interval = options.DEFAULT_INTERVAL,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """List the open and the last decided barriers."""
    with connect(endpoint, timeout) as client:
        found = client.barriers(run, history)
        if not found.barriers:
            note(
                f"no barriers {f'of run {run} ' if run else ''}have been arrived at on {client.endpoint} yet"
            )
        if watch:
            polls = _polls(found, lambda: client.barriers(run, history), interval)
            fresh = changes((poll.barriers for poll in polls), barrier_key, barrier_content)
            _print_each(fresh, columns.BARRIERS, output)
        else:
            _print_all(found, found.barriers, columns.BARRIERS, output)


@app.command()
@connecting
def members(
    run: options.Run,
    output: options.Format = Output.TABLE,
    watch: options.Watch = False,
    interval: options.Interval = options.DEFAULT_INTERVAL,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """List the processes of a run."""
    with connect(endpoint, timeout) as client:
        found = client.members(run)
        if not found.members:
            note(f"no members of run {run} have said hello to {client.endpoint} yet")
        if watch:
            polls = _polls(found, lambda: client.members(run), interval)
            fresh = changes((poll.members for poll in polls), member_key, member_content)
            _print_each(fresh, columns.MEMBERS, output)
        else:
            _print_all(found, found.members, columns.MEMBERS, output)


@app.command()
@connecting
def rounds(
    run: options.Run,
    output: options.Format = Output.TABLE,
    watch: options.Watch = False,
    interval: options.Interval = options.DEFAULT_INTERVAL,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """List the rendezvous rounds of a run, newest first.

    With -o wide, also the nodes that get copies of each node's local checkpoints.
    """
    with connect(endpoint, timeout) as client:

        def rows_of(rendezvous: rendezvous_pb2.Rendezvous) -> list[RoundRow]:
            return rounds_of(rendezvous, _placement(client, run) if output is Output.WIDE else "")

        found = client.rendezvous(run)
        rows = rows_of(found.rendezvous)
        if not rows:
            note(found.rendezvous.message)
        if not watch:
            _print_all(found, rows, columns.ROUNDS, output)
            return
        polls = (poll.rendezvous for poll in _polls(found, lambda: client.rendezvous(run), interval))
        if output is Output.JSON:
            # A round is not a message, so print the whole rendezvous.
            each = ([poll] for poll in polls)
            _print_lines(changes(each, lambda poll: poll.run_id, rendezvous_content))
        else:
            fresh = changes(map(rows_of, polls), round_key, lambda row: row)
            _print_batches(fresh, columns.ROUNDS, output)


@app.command()
@connecting
def checkpoints(
    run: options.Run,
    output: options.Format = Output.TABLE,
    watch: options.Watch = False,
    interval: options.Interval = options.DEFAULT_INTERVAL,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """List the local checkpoints of a run, newest first, with the cost of losing a node.

    Those in shared storage: muster checkpoint list PLACE.
    """
    with connect(endpoint, timeout) as client:
        found = client.local_checkpoints(run)
        if not found.checkpoints:
            note(
                f"run {run} has no local checkpoints on {client.endpoint}\n"
                "  next: give its Checkpointer a folder on the nodes (local=…); "
                "muster checkpoint list PLACE shows those in shared storage"
            )
        if not watch:
            _print_all(found, checkpoint_rows(found), columns.CHECKPOINTS, output)
            return
        polls = _polls(found, lambda: client.local_checkpoints(run), interval)
        fresh = changes(map(checkpoint_rows, polls), checkpoint_key, checkpoint_content)
        if output is Output.JSON:
            _print_lines([row.view for row in batch] for batch in fresh)
        else:
            _print_batches(fresh, columns.CHECKPOINTS, output)


@app.command()
@connecting
def keepers(
    run: options.Run,
    output: options.Format = Output.TABLE,
    watch: options.Watch = False,
    interval: options.Interval = options.DEFAULT_INTERVAL,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """List the keepers of a run: the processes that keep local checkpoints on its nodes."""
    with connect(endpoint, timeout) as client:
        found = client.local_checkpoints(run)
        if not found.keepers:
            note(
                f"run {run} has no keepers on {client.endpoint}\n"
                "  next: give its Checkpointer a folder on the nodes (local=…); if it has one, "
                "see keeper.log in that folder"
            )
        if not watch:
            _print_all(found, keeper_rows(found), columns.KEEPERS, output)
            return
        polls = _polls(found, lambda: client.local_checkpoints(run), interval)
        fresh = changes(map(keeper_rows, polls), keeper_key, keeper_content)
        if output is Output.JSON:
            _print_lines([row.view for row in batch] for batch in fresh)
        else:
            _print_batches(fresh, columns.KEEPERS, output)


@app.command()
@connecting
def replicas(
    output: options.Format = Output.TABLE,
    watch: options.Watch = False,
    interval: options.Interval = options.DEFAULT_INTERVAL,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """List the replicas of a coordinator with its state in etcd."""
    with connect(endpoint, timeout) as client:
        found = client.replicas()
        if not found.replicas:
            note(f"the coordinator at {client.endpoint} is the only one: its state is not in etcd")
        if watch:
            polls = _polls(found, client.replicas, interval)
            fresh = changes((poll.replicas for poll in polls), lambda one: one.address, lambda one: one.leads)
            _print_each(fresh, columns.REPLICAS, output)
        else:
            _print_all(found, found.replicas, columns.REPLICAS, output)


def _placement(client: Client, run: str) -> str:
    """Return where copies of local checkpoints go; empty: nowhere."""
    try:
        return placement(client.local_checkpoints(run))
    except CallError:  # An older coordinator knows no local checkpoints.
        return ""


# ---------------------------------------------------------------------- printing


def _print_all(response: Message, rows: Iterable[Row], shown: list[Column[Row]], output: Output) -> None:
    if output is Output.JSON:
        emit(document(as_dict(response)))
    elif rows:
        emit(_table(shown, output).text(rows))


def _print_each(batches: Iterable[list[MessageRow]], shown: list[Column[MessageRow]], output: Output) -> None:
    if output is Output.JSON:
        _print_lines(batches)
    else:
        _print_batches(batches, shown, output)


def _print_lines(batches: Iterable[list[MessageRow]]) -> None:
    for batch in batches:
        for row in batch:
            emit(json_line(as_dict(row)))


def _print_batches(batches: Iterable[list[Row]], shown: list[Column[Row]], output: Output) -> None:
    table = _table(shown, output)
    for batch in batches:
        if batch:
            emit(table.text(batch))


def _table(shown: list[Column[Row]], output: Output) -> Table[Row]:
    wide = output is Output.WIDE
    return Table(shown, wide=wide, color=colorful(), cut_at=None if wide else terminal_width())


# ---------------------------------------------------------------------- watching


Poll = TypeVar("Poll")


def _polls(first: Poll, poll: Callable[[], Poll], interval: float) -> Iterator[Poll]:
    yield first
    while True:
        time.sleep(interval)
        yield poll()


def changes(
    polls: Iterable[Iterable[Row]], key: Callable[[Row], Hashable], content: Callable[[Row], object]
) -> Iterator[list[Row]]:
    """Yield, for each poll, the rows that are new or have changed since the previous poll.

    Args:
        polls: all rows at each poll.
        key: identifies a row across polls.
        content: the part of a row whose change counts; ages are not in it.
    """
    before: dict[Hashable, object] = {}
    for rows in polls:
        now = {key(row): content(row) for row in rows}
        yield [row for row in rows if key(row) not in before or before[key(row)] != now[key(row)]]
        before = now


def barrier_key(barrier: barrier_pb2.Barrier) -> Hashable:
    """Return what identifies a barrier."""
    return barrier.run_id, barrier.prefix, barrier.sequence


def barrier_content(barrier: barrier_pb2.Barrier) -> object:
    """Return a barrier without its ages."""
    return (
        columns.barrier_state(barrier),
        barrier.arrived,
        barrier.required,
        [(one.rank, one.host, one.pid, one.state) for one in barrier.missing],
    )


def member_key(member: run_pb2.Member) -> Hashable:
    """Return what identifies a process."""
    return member.rank, member.incarnation


def member_content(member: run_pb2.Member) -> object:
    """Return a member without its age."""
    return member.state, member.generation, [str(group) for group in member.groups]


def checkpoint_key(row: CheckpointRow) -> Hashable:
    """Return what identifies a local checkpoint."""
    return row.attempt


def checkpoint_content(row: CheckpointRow) -> object:
    """Return a local checkpoint without its age."""
    return row.level, row.copies, row.loss, row.view.pending, row.view.persisted_as


def keeper_key(row: KeeperRow) -> Hashable:
    """Return what identifies a keeper."""
    return row.view.keeper.id


def keeper_content(row: KeeperRow) -> object:
    """Return a keeper without its used space, which every checkpoint changes."""
    return row.state, row.ranks, row.copies_to, str(row.view.keeper), row.view.disk.quota


def rendezvous_content(rendezvous: rendezvous_pb2.Rendezvous) -> object:
    """Return a rendezvous without its ages."""
    return (
        rendezvous.round,
        rendezvous.complete,
        rendezvous.min_nodes,
        rendezvous.max_nodes,
        [(one.node.incarnation, one.standing, one.rank, one.connected) for one in rendezvous.nodes],
        rendezvous.departed[0].node.incarnation if rendezvous.departed else "",
        rendezvous.HasField("closed"),
    )
