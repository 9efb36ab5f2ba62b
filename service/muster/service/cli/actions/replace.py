"""``muster replace``: replace a node of a run with one that stands by, at a step that all ranks saved."""

import time
from collections.abc import Callable, Iterator
from typing import Annotated, NamedTuple, NoReturn, TypeVar

import typer

from muster.service.cli import options
from muster.service.cli.client.caller import caller
from muster.service.cli.client.coordinator_client import CallError, Client, connect
from muster.service.cli.client.credentials import connecting
from muster.service.cli.failure import Exit, fail
from muster.service.cli.options import Output
from muster.service.cli.views.table import counted, document, emit, headed
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.refusal import Reason
from muster.service.formatting.requested_saves import save_text
from muster.service.wire import as_dict, closed_from_pb, stopped_from_pb
from muster.v1 import rendezvous_pb2, run_pb2

T = TypeVar("T")

POLL_INTERVAL = 0.5
"""Seconds between two looks at the run."""
ASK_AGAIN = 5.0
"""Seconds after which a save is requested again, since the ranks may have failed to agree on a step."""
DEFAULT_WAIT = 600.0

NoSave = Annotated[
    bool,
    typer.Option(
        "--no-save",
        help="Do not save first: training goes on from the last checkpoint. For a node that hangs.",
    ),
]
Wait = Annotated[
    float,
    typer.Option(
        min=0.0,
        callback=options.finite,
        metavar="SECONDS",
        help="Time for all steps together. If it is over, the exit code is 4.",
    ),
]


@connecting
def replace(
    run: options.Run,
    node: options.Node,
    reason: options.Reason = "",
    wait: Wait = DEFAULT_WAIT,
    no_save: NoSave = False,
    dry_run: options.DryRun = False,
    output: options.Format = Output.TABLE,
    endpoint: options.Endpoint = options.DEFAULT_ENDPOINT,
    timeout: options.Timeout = options.DEFAULT_TIMEOUT,
) -> None:
    """Replace a node with one that stands by, at a step that all ranks saved.

    The command waits for a node on standby, and for a save of all ranks. Then it evicts the node, and waits
    for the next round. You may repeat it at any time.
    """
    with connect(endpoint, timeout) as client:
        replacement = Replacement(client, run, node, reason, wait, save=not no_save)
        if dry_run:
            planned = client.evict_node(replacement.eviction(dry_run=True))
            emit(document(as_dict(planned)) if output is Output.JSON else plan_text(run, node, planned))
            return
        done = replacement.carry_out()
    emit(document(as_dict(done.rendezvous)) if output is Output.JSON else done_text(run, node, done))


class Done(NamedTuple):
    """The end of a replacement."""

    rendezvous: rendezvous_pb2.Rendezvous
    evicted: bool
    """False: the node was not in the round."""


class Replacement:
    """The steps of one replacement. Each looks at the run first, so that it may be repeated."""

    def __init__(self, client: Client, run: str, node: str, reason: str, wait: float, *, save: bool) -> None:
        self._client = client
        self._run = run
        self._node = node
        self._reason = reason
        self._wait = wait
        self._saves = save
        self._deadline = time.monotonic() + wait
        self._said = ""

    def eviction(self, *, dry_run: bool = False) -> rendezvous_pb2.EvictNodeRequest:
        """Return the request to evict the node."""
        return rendezvous_pb2.EvictNodeRequest(
            run_id=self._run,
            node_name=self._node,
            by=caller(),
            reason=self._reason,
            only_if_spare=True,
            dry_run=dry_run,
        )

    def carry_out(self) -> Done:
        """Carry out all steps. If one fails, end the command with an error."""
        evicted = False
        while True:
            while self._await_spare():
                if self._saves:
                    self._save()
                if self._evict():
                    evicted = True
                    break
            if (now := self._await_round()) is not None:
                return Done(now, evicted)

    def _await_spare(self) -> bool:
        """Wait until other nodes stand by for the node. Returns False if it is not in the round."""
        for now in self._looks():
            own = on_node(now, self._node)
            needed = sum(map(_in_round, own))
            if not needed:
                return False
            spares = sum(_is_spare(one) for one in now.nodes if one not in own)
            if spares >= needed:
                return True
            self._say(f"waiting for a node on standby: {spares} of {needed}")
            if self._over:
                self._no_spare(now, spares, needed)
        raise AssertionError

    def _no_spare(self, now: rendezvous_pb2.Rendezvous, spares: int, needed: int) -> NoReturn:
        full = len(participants(now)) >= now.max_nodes
        why = "" if full else f" Its round has room: a node stands by only beyond {now.max_nodes} nodes."
        self._time_out(
            f"{spares} of {needed} nodes stand by for node {self._node} of run {self._run}.{why} "
            "Nothing was evicted",
            "start an agent on another node, with the same run id and --nnodes, and repeat the command",
        )

    def _save(self) -> None:
        """Ask all ranks for a save, and wait until it is done."""
        why = f"node {self._node} is being replaced"
        request = run_pb2.RequestSaveRequest(
            run_id=self._run, by=caller(), reason=f"{why}: {self._reason}" if self._reason else why
        )
        number, asked_at = 0, float("-inf")
        while True:
            if time.monotonic() >= asked_at + ASK_AGAIN:
                number, asked_at = (
                    self._call(self._client.request_save, request).save.number,
                    time.monotonic(),
                )
            save = self._call(self._client.run, self._run).run.save
            self._say(save_text(save))
            if save.stop and save.state in (run_pb2.SAVE_STATE_ASKED, run_pb2.SAVE_STATE_AGREED):
                text = f"run {self._run}: {save_text(save)}, and training is to end after it"
                fail(f"{text}. Nothing was evicted", Exit.CLOSED)
            if save.number >= number and save.state == run_pb2.SAVE_STATE_DONE:
                return
            if save.state in (run_pb2.SAVE_STATE_WITHDRAWN, run_pb2.SAVE_STATE_LAPSED):
                fail(f"run {self._run}: {save_text(save)}. Nothing was evicted", Exit.CLOSED)
            if save.state != run_pb2.SAVE_STATE_ASKED:
                asked_at = time.monotonic()
            if self._over:
                self._time_out(
                    f"run {self._run}: {save_text(save)}. Nothing was evicted",
                    f"{report.command('stack', self._run)}, or replace a node that hangs with --no-save",
                )
            time.sleep(POLL_INTERVAL)

    def _evict(self) -> bool:
        """Evict the node. Returns False if no node stands by any more."""
        self._say(f"evicting node {self._node}")
        try:
            self._call(self._client.evict_node, self.eviction())
        except CallError as error:
            if error.reason == Reason.NO_SPARE.name and not self._over:
                return False
            # Another one has evicted it, or the answer to an earlier attempt was lost.
            if error.reason != Reason.NODE_NOT_FOUND.name:
                raise
        return True

    def _await_round(self) -> rendezvous_pb2.Rendezvous | None:
        """Wait for a whole round. Returns None if the node is in it, by a new agent or one that was away."""
        for now in self._looks():
            # A round that a node has left is over, and its others are about to join the next one.
            if now.complete and len(participants(now)) == now.rounds[0].world_size:
                back = any(one in participants(now) for one in on_node(now, self._node))
                return None if back else now
            self._say(f"waiting for the next round: {now.message}")
            if self._over:
                self._time_out(
                    f"node {self._node} has left run {self._run}, and no round is complete without it",
                    report.command("get rounds", self._run),
                )
        raise AssertionError

    def _looks(self) -> Iterator[rendezvous_pb2.Rendezvous]:
        """Look at the rendezvous again and again, while the run forms rounds."""
        while True:
            now = self._call(self._client.rendezvous, self._run).rendezvous
            if now.HasField("closed"):
                fail(report.run_closed(self._run, closed_from_pb(now.closed)), Exit.CLOSED)
            if now.HasField("stopped"):
                fail(report.run_stopped(self._run, stopped_from_pb(now.stopped)), Exit.CLOSED)
            if not (now.nodes or now.rounds):
                fail(f"{report.no_rendezvous(self._run)}, so none can be replaced", Exit.FAILED)
            yield now
            time.sleep(POLL_INTERVAL)

    def _call(self, method: Callable[..., T], *arguments: object) -> T:
        """Make a call, again and again while the coordinator cannot be reached."""
        while True:
            try:
                return method(*arguments)
            except CallError as error:
                if error.code not in (Exit.UNREACHABLE, Exit.TIMED_OUT) or self._over:
                    raise
                self._say(f"trying again: {str(error).splitlines()[0]}")
                time.sleep(POLL_INTERVAL)

    @property
    def _over(self) -> bool:
        return time.monotonic() >= self._deadline

    def _say(self, line: str) -> None:
        """Show progress on stderr. The same line is not shown twice in a row."""
        if line != self._said:
            self._said = line
            typer.echo(report.printable(f"run {self._run}: {line}"), err=True)

    def _time_out(self, what: str, following: str) -> NoReturn:
        fail(f"{what}. The time is over: {report.seconds(self._wait)}\n  next: {following}", Exit.TIMED_OUT)


def on_node(rendezvous: rendezvous_pb2.Rendezvous, node: str) -> list[rendezvous_pb2.NodeView]:
    """Return the agents on a node, by its name or an address of it."""
    found = [one for one in rendezvous.nodes if node in (one.node.name, one.node.address)]
    names = {one.node.name or one.node.address for one in found}
    return [one for one in rendezvous.nodes if (one.node.name or one.node.address) in names]


def participants(rendezvous: rendezvous_pb2.Rendezvous) -> list[rendezvous_pb2.NodeView]:
    """Return the agents in the round."""
    return [one for one in rendezvous.nodes if one.standing == rendezvous_pb2.NODE_STANDING_PARTICIPANT]


def _in_round(view: rendezvous_pb2.NodeView) -> bool:
    """Whether an agent is in the round, or is about to be let in."""
    return view.standing in (
        rendezvous_pb2.NODE_STANDING_PARTICIPANT,
        rendezvous_pb2.NODE_STANDING_WAITING,
    )


def _is_spare(view: rendezvous_pb2.NodeView) -> bool:
    return view.connected and view.standing == rendezvous_pb2.NODE_STANDING_REDUNDANT


def done_text(run: str, node: str, done: Done) -> str:
    """Describe the round without the node."""
    now = done.rendezvous
    what = f"node {node} was replaced" if done.evicted else f"node {node} is not in the round"
    names = [one.node.name or one.node.address for one in participants(now)]
    nodes = f"{counted(len(names), 'node', 'nodes')}: {report.first_names(names)}"
    return f"run {run}: {what}; round {now.round} is complete with {nodes}"


def plan_text(run: str, node: str, planned: rendezvous_pb2.EvictNodeResponse) -> str:
    """Describe the agents that the command would evict, and the spares."""
    lines = [f"agent {one.node.address} (pid {one.node.pid}) is evicted" for one in planned.evicted]
    return headed(
        f"would replace node {node} of run {run}",
        [*lines, f"{counted(planned.spares, 'node', 'nodes')} of other machines on standby"],
    )
