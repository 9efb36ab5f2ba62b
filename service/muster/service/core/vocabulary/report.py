"""Sentences about decisions, missing ranks and rounds; no other module words them.

Log, exception, CLI and RPC status all show what these functions return.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from muster.service.core.vocabulary.model import (
    Closed,
    Failure,
    MissingRank,
    MissingState,
    NodeInfo,
    Outcome,
    RendezvousSettings,
    Stopped,
)

MAX_NAMED_SINGLY = 16
"""Largest number of missing ranks to name one by one; more are grouped into ranges by host."""

MAX_SHOWN_LENGTH = 80
"""Characters of a received name or reason that are shown; the rest is cut."""

MAX_SAVE_REASON = 400
"""Longest reason of a failed save, in characters."""


def printable(text: str) -> str:
    """Return the text with visible control characters and terminal escapes; newlines stay."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def shown(name: str) -> str:
    """Return a received name or reason for use in a sentence: printable and not too long."""
    return printable(name if len(name) <= MAX_SHOWN_LENGTH else f"{name[:MAX_SHOWN_LENGTH]}…")


def command(verb: str, *names: object) -> str:
    """Return a command to paste into a shell. The names are quoted, because clients chose them."""
    words = [str(name) for name in names]
    end_of_options = ["--"] if any(word.startswith("-") for word in words) else []
    return f"muster {verb} {shlex.join([*end_of_options, *words])}"


def seconds(value: float) -> str:
    """Return a duration in words: ``4 ms``, ``2.5 s``, ``300 s``."""
    if value < 1:
        return f"{value * 1000:.0f} ms"
    return f"{value:.3g} s" if value < 10 else f"{value:.0f} s"


def period(value: float) -> str:
    """Return a long duration in words: ``40 s``, ``10 min``, ``24 h``, ``7 days``."""
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if value >= 2 * size and value % size == 0:
            return f"{value / size:.0f} {unit}"
    return seconds(value)


def barrier_name(run_id: str, prefix: str, sequence: int) -> str:
    """Return the name of a barrier."""
    return f'barrier "{prefix}" #{sequence} of run {run_id}'


def process_name(rank: int, host: str, pid: int) -> str:
    """Return the name of a rank and its process."""
    return f"rank {rank} ({host}, pid {pid})"


def ranges(ranks: Iterable[int]) -> str:
    """Return ``[0, 1, 2, 5]`` as ``0-2, 5``."""
    parts = []
    for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ", ".join(parts)


MISSING_WORDS = {
    MissingState.NEVER_JOINED: "never joined",
    MissingState.NOT_ARRIVED: "connected, not arrived",
    MissingState.CONNECTION_LOST: "connection lost",
    MissingState.LEFT: "left",
    MissingState.EVICTED: "evicted",
}
"""Short reasons why a rank is missing."""


def why_missing(missing: MissingRank) -> str:
    """Return why a rank is missing: ``connection lost 41 s ago``."""
    words = MISSING_WORDS[missing.state]
    match missing.state:
        case MissingState.NEVER_JOINED:
            return words
        case MissingState.NOT_ARRIVED:
            if missing.last_sequence is None:
                return f"{words} yet"
            return f"connected, still at #{missing.last_sequence}"
        case _:
            return f"{words} {seconds(missing.gone_for)} ago"


def missing_one(missing: MissingRank) -> str:
    """Return one missing rank: ``rank 3 (node-0, pid 4121, connected, still at #6)``, then its activity."""
    if not missing.host:
        return f"rank {missing.rank} ({why_missing(missing)})"
    name = f"rank {missing.rank} ({missing.host}, pid {missing.pid}, {why_missing(missing)})"
    return f"{name}: {missing.doing}" if missing.doing else name


@dataclass(slots=True)
class MissingOfHost:
    """The ranks of one host that are missing for one reason."""

    host: str
    """Empty if no process of these ranks was ever seen."""
    state: MissingState
    why: str
    doing: str = ""
    """What they were observed doing, for people; empty if unknown."""
    ranks: list[int] = field(default_factory=list)
    pids: list[int] = field(default_factory=list)
    """In the order of the ranks."""


def by_host(missing: Iterable[MissingRank]) -> list[MissingOfHost]:
    """Group missing ranks by host, reason and activity, in the order of the first rank of each group."""
    folded: dict[tuple[str, str, str], MissingOfHost] = {}
    for one in missing:
        key = one.host, why_missing(one), one.doing
        of_host = folded.get(key)
        if of_host is None:
            of_host = folded[key] = MissingOfHost(one.host, one.state, key[1], one.doing)
        of_host.ranks.append(one.rank)
        of_host.pids.append(one.pid)
    return list(folded.values())


def missing_all(missing: Sequence[MissingRank]) -> str:
    """Return all missing ranks: one by one while they are few, else in ranges by host and reason."""
    if len(missing) <= MAX_NAMED_SINGLY:
        between = "; " if any(one.doing for one in missing) else ", "
        return between.join(missing_one(one) for one in missing)
    return "; ".join(
        f"{'ranks' if len(one.ranks) > 1 else 'rank'} {ranges(one.ranks)} "
        f"({f'{one.host}, ' if one.host else ''}{one.why}){f': {one.doing}' if one.doing else ''}"
        for one in by_host(missing)
    )


def roll_call(arrived: int, required: int, missing: Sequence[MissingRank]) -> str:
    """Return how many ranks arrived, and which are missing."""
    line = f"arrived {arrived} of {required}"
    return f"{line}; missing: {missing_all(missing)}" if missing else line


def progress(name: str, waited: float, arrived: int, required: int, missing: Sequence[MissingRank]) -> str:
    """Return the straggler warning."""
    return f"{name} has waited {seconds(waited)}: {roll_call(arrived, required, missing)}"


def late_save(missing: Sequence[MissingRank], count: int, *, agreed: bool) -> str:
    """Return which ranks had not saved at the deadline of a requested save.

    Args:
        missing: the first of them.
        count: how many there are.
        agreed: whether they had agreed on a step.
    """
    what = "had not saved" if agreed else "had not agreed on a step"
    more = f"; and {count - len(missing):,} more" if count > len(missing) else ""
    return f"{'ranks' if count > 1 else 'rank'} that {what}: {missing_all(missing)}{more}"


def released(required: int, waited: float, last_rank: int) -> str:
    """Return why a barrier was released."""
    return f"was released: {required} of {required} arrived in {seconds(waited)}, rank {last_rank} last"


def timed_out(timeout: float) -> str:
    """Return why a barrier timed out."""
    return f"timed out after {seconds(timeout)} (the first arrival's timeout)"


def voted(failures: Sequence[Failure]) -> str:
    """Return why a vote aborted a barrier."""
    votes = "; ".join(f"{process_name(f.rank, f.host, f.pid)} failed: {f.reason}" for f in failures)
    return f"was aborted: {votes}"


def aborted(reason: str) -> str:
    """Return why something other than a vote aborted a barrier."""
    return f"was aborted: {reason}"


def save_failed(
    why: str, outcome: Outcome, arrived: int, required: int, missing: Sequence[MissingRank]
) -> str:
    """Return why a save failed, in one line: without the traceback of a vote, and cut if it is long."""
    line = printable(why.split("\n", 1)[0])
    if outcome is Outcome.TIMED_OUT:
        line += f"; {roll_call(arrived, required, missing)}"
    return line if len(line) <= MAX_SAVE_REASON else f"{line[:MAX_SAVE_REASON]}…"


def given_up(ranks: Sequence[int]) -> str:
    """Return why a save failed although its barrier was released."""
    what = "rank" if len(ranks) == 1 else "ranks"
    return f"was given up by {what} {ranges(ranks)}: the call that makes it ended before they were done"


def superseded(generation: int) -> str:
    """Return the reason of an abort by a newer generation."""
    return f"superseded by generation {generation}"


def abandoned(newcomer: str) -> str:
    """Return the reason of an abort by a newcomer to a group whose processes have all left."""
    return f"every process of this group has left, and {newcomer} starts it again"


def member_lost(gone: Sequence[MissingRank]) -> str:
    """Return why a barrier failed whose ranks died."""
    return f"lost {missing_all(gone)}"


def mismatched(kind: str, one: str, one_value: str, other: str, other_value: str) -> str:
    """Return why a barrier failed whose living ranks disagreed."""
    return f"failed: ranks disagree on the {kind}: {one} says {one_value}, {other} says {other_value}"


def decision(
    name: str,
    why: str,
    outcome: Outcome,
    run_id: str,
    arrived: int,
    required: int,
    missing: Sequence[MissingRank],
    suspect: int | None,
) -> str:
    """Return the report of a decision: headline, missing ranks, and what to do next, one line each."""
    headline = printable(f"{name} {why}").replace("\n", "\n    ")
    if outcome is Outcome.RELEASED:
        return headline
    lines = [headline, f"  {roll_call(arrived, required, missing)}"]
    if suspect is not None:
        lines.append(f"  next: {command('describe member', run_id, suspect)}")
    return "\n".join(lines)


# ---------------------------------------------------------------------- rendezvous


def node_name(node: NodeInfo) -> str:
    """Return the name of a node."""
    return f"{node.address} (pid {node.pid})"


def node_names(nodes: Sequence[NodeInfo]) -> str:
    """Return the names of the first nodes, and how many more there are."""
    return first_names([node_name(node) for node in nodes])


def first_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    named = ", ".join(names[:MAX_NAMED_SINGLY])
    more = len(names) - MAX_NAMED_SINGLY
    return f"{named} and {more} more" if more > 0 else named


def agents(count: int) -> str:
    """Return ``1 agent`` or ``2 agents``."""
    return f"{count} {'agent' if count == 1 else 'agents'}"


def nodes_wanted(settings: RendezvousSettings) -> str:
    """Return ``4 nodes`` or ``2 to 4 nodes``."""
    least, most = settings.min_nodes, settings.max_nodes
    if least == most:
        return f"{most} {'node' if most == 1 else 'nodes'}"
    return f"{least} to {most} nodes"


def no_rendezvous(run_id: str) -> str:
    """Return the state before the first node."""
    return f"no node has joined run {run_id}"


def round_forms(run_id: str, round: int, count: int, settings: RendezvousSettings) -> str:
    """Return the state of a forming round."""
    return f"round {round} of run {run_id} comes together: {count} of {nodes_wanted(settings)} have joined"


def earlier_nodes(settings: RendezvousSettings | None) -> str:
    """Return which earlier nodes a round waits for; empty without any."""
    if settings is None:
        return ""
    return (
        f". It waits up to {seconds(settings.keep_alive_timeout)} for nodes that had agreed on "
        f"{nodes_wanted(settings)} before the coordinator restarted"
    )


def round_runs(run_id: str, round: int, count: int, waiting: int, redundant: int) -> str:
    """Return the state of a complete round."""
    line = (
        f"round {round} of run {run_id} is complete, with {count} {'node' if count == 1 else 'nodes'} in it"
    )
    if waiting:
        line += f", {waiting} waiting to be let in"
    return f"{line}, {redundant} standing by" if redundant else line


def round_completed(run_id: str, round: int, nodes: Sequence[NodeInfo], waited: float) -> str:
    """Return the log entry of a completed round."""
    return f"round {round} of run {run_id} was completed in {seconds(waited)}: {node_names(nodes)}"


def rendezvous_timed_out(
    run_id: str,
    round: int,
    timeout: float,
    joined: Sequence[NodeInfo],
    settings: RendezvousSettings,
    *,
    running: int | None,
) -> str:
    """Return why a node got no round; ``running`` is the size of a complete round that it waited for."""
    if running is not None:
        return (
            f"the {running} nodes of round {round} of run {run_id} let nobody in within the join timeout "
            f"of {seconds(timeout)}; waiting: {node_names(joined)}"
        )
    return (
        f"round {round} of run {run_id} did not come together within the join timeout of {seconds(timeout)}: "
        f"{len(joined)} of {nodes_wanted(settings)} had joined: {node_names(joined)}"
    )


def nodes_gone(gone: Sequence[tuple[NodeInfo, int, str, float]]) -> str:
    """Return a line about departed nodes, given as (node, round, reason, seconds ago); empty without any."""
    if not gone:
        return ""
    named = "; ".join(
        f"{node_name(node)} of round {round}, {reason} {seconds(ago)} ago"
        for node, round, reason, ago in gone[:MAX_NAMED_SINGLY]
    )
    return f"\n  gone: {named}"


def run_forgotten(run_id: str, closed: bool, kept: float) -> str:
    """Return why an unused run was removed."""
    state = "closed, and " if closed else ""
    return f"run {run_id} was forgotten: {state}nobody has used it for {period(kept)}"


def made_room(run_id: str, most: int) -> str:
    """Return why a closed run was removed before its retention time."""
    return f"run {run_id} was forgotten: it was closed, and a new run needed its place (max_runs is {most:,})"


def forgotten_on_demand(run_id: str) -> str:
    """Return why a run was removed that may have been in use."""
    return f"run {run_id} was forgotten: an operator asked for it (muster forget)"


def users(processes: int, nodes: int, calls: int) -> str:
    """Return the users of a run."""
    counted = (
        (processes, "process is", "processes are", "connected to it, or may come back"),
        (nodes, "node has", "nodes have", "a place in its rendezvous"),
        (calls, "call waits", "calls wait", "for its keys"),
    )
    found = [f"{count:,} {one if count == 1 else many} {what}" for count, one, many, what in counted if count]
    return "; ".join(found) or "a barrier with an arrival is open"


def run_closed(run_id: str, closed: Closed) -> str:
    """Return how a run was closed."""
    why = f": {shown(closed.reason)}" if closed.reason else ""
    return f"run {run_id} was closed by {shown(closed.by)}{why}"


def run_stopped(run_id: str, stopped: Stopped) -> str:
    """Return how a run was stopped."""
    why = f": {shown(stopped.reason)}" if stopped.reason else ""
    return f"run {run_id} was stopped at step {stopped.step} by {shown(stopped.by)}{why}"


def requested(by: str, reason: str) -> str:
    """Return who requested something, and why: ``by ann@login-1: bad disk``."""
    return f"by {shown(by)}: {shown(reason)}" if reason else f"by {shown(by)}"


def evicted(reason: str) -> str:
    """Return why the processes of a rank were evicted."""
    return f"evicted: {shown(reason)}" if reason else "evicted"
