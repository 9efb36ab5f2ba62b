"""``muster get``: runs, barriers, members, rounds and replicas, in lists."""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Annotated, TypeVar

import typer
from google.protobuf.message import Message

from muster.service.cli import options
from muster.service.cli.client.coordinator_client import connect
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
from muster.service.formatting.rounds import round_key, rounds_of
from muster.service.wire import as_dict
from muster.v1 import barrier_pb2, rendezvous_pb2, run_pb2

Row = TypeVar("Row")
MessageRow = TypeVar("MessageRow", bound=Message)

History = Annotated[
    int,
    typer.Option(min=1, max=1000, metavar="N", help="Decided barriers to show of each group, newest first."),
]

app = typer.Typer(help="List runs, barriers, members, rounds or replicas.", no_args_is_help=True)


@app.command()
@connecting
def runs(
    run: options.OptionalRun = "",
    output: options.Format = Output.TABLE,
    watch: options.Watch = False,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """List runs, with their ranks and barriers counted."""
    with connect(endpoint, timeout) as client:
        # A watch asks for the list too: its stream has no deadline, and cannot say that there is no such run.
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
            looks = _looks(found, lambda: client.barriers(run, history), interval)
            fresh = changes((look.barriers for look in looks), barrier_key, barrier_standing)
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
            looks = _looks(found, lambda: client.members(run), interval)
            fresh = changes((look.members for look in looks), member_key, member_standing)
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
    """List the rendezvous rounds of a run, newest first."""
    with connect(endpoint, timeout) as client:
        found = client.rendezvous(run)
        rows = rounds_of(found.rendezvous)
        if not rows:
            note(found.rendezvous.message)
        if not watch:
            _print_all(found, rows, columns.ROUNDS, output)
            return
        looks = (look.rendezvous for look in _looks(found, lambda: client.rendezvous(run), interval))
        if output is Output.JSON:
            # A round is no message of its own: what is printed is the whole rendezvous.
            each = ([look] for look in looks)
            _print_lines(changes(each, lambda look: look.run_id, rendezvous_standing))
        else:
            fresh = changes(map(rounds_of, looks), round_key, lambda row: row)
            _print_batches(fresh, columns.ROUNDS, output)


@app.command()
@connecting
def replicas(
    output: options.Format = Output.TABLE,
    watch: options.Watch = False,
    interval: options.Interval = options.DEFAULT_INTERVAL,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """List the coordinators of which one leads, where the state is in etcd."""
    with connect(endpoint, timeout) as client:
        found = client.replicas()
        if not found.replicas:
            note(f"the coordinator at {client.endpoint} is the only one: its state is not in etcd")
        if watch:
            looks = _looks(found, client.replicas, interval)
            fresh = changes((look.replicas for look in looks), lambda one: one.address, lambda one: one.leads)
            _print_each(fresh, columns.REPLICAS, output)
        else:
            _print_all(found, found.replicas, columns.REPLICAS, output)


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


Look = TypeVar("Look")


def _looks(first: Look, look: Callable[[], Look], interval: float) -> Iterator[Look]:
    yield first
    while True:
        time.sleep(interval)
        yield look()


def changes(
    looks: Iterable[Iterable[Row]], key: Callable[[Row], Hashable], standing: Callable[[Row], object]
) -> Iterator[list[Row]]:
    """Of each look the rows that are new, or stand otherwise than at the look before.

    Args:
        looks: all rows, again and again.
        key: what makes a row the same one at the next look.
        standing: what counts as a change; time that passes does not.
    """
    before: dict[Hashable, object] = {}
    for rows in looks:
        now = {key(row): standing(row) for row in rows}
        yield [row for row in rows if key(row) not in before or before[key(row)] != now[key(row)]]
        before = now


def barrier_key(barrier: barrier_pb2.Barrier) -> Hashable:
    """Which barrier it is."""
    return barrier.run_id, barrier.prefix, barrier.sequence


def barrier_standing(barrier: barrier_pb2.Barrier) -> object:
    """A barrier without its clocks."""
    return (
        columns.barrier_state(barrier),
        barrier.arrived,
        barrier.required,
        [(one.rank, one.host, one.pid, one.state) for one in barrier.missing],
    )


def member_key(member: run_pb2.Member) -> Hashable:
    """Which process it is."""
    return member.rank, member.incarnation


def member_standing(member: run_pb2.Member) -> object:
    """A member without its clock."""
    return member.state, member.generation, [str(group) for group in member.groups]


def rendezvous_standing(rendezvous: rendezvous_pb2.Rendezvous) -> object:
    """A rendezvous without its clocks."""
    return (
        rendezvous.round,
        rendezvous.complete,
        rendezvous.min_nodes,
        rendezvous.max_nodes,
        [(one.node.incarnation, one.standing, one.rank, one.connected) for one in rendezvous.nodes],
        rendezvous.departed[0].node.incarnation if rendezvous.departed else "",
        rendezvous.HasField("closed"),
    )
