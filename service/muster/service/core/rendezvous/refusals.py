"""Why a rendezvous refuses a node, or ends its stream."""

from collections.abc import Iterable

from muster.service.core.rendezvous.nodes import Departed, Node
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.events import JoinRendezvous
from muster.service.core.vocabulary.model import Closed, NodeInfo, RendezvousSettings, Stopped
from muster.service.core.vocabulary.refusal import Reason, Refusal


def run_closed(run_id: str, closed: Closed) -> Refusal:
    """Return the refusal for a newcomer to a closed run: invariant 13 (closing is final)."""
    return Refusal(
        Reason.RUN_CLOSED,
        f"{report.run_closed(run_id, closed)}. A closed run admits no newcomers: start the job under "
        "another run id.",
    )


def run_stopped(run_id: str, stopped: Stopped) -> Refusal:
    """Return the refusal for a node of a stopped run."""
    return Refusal(
        Reason.RUN_STOPPED,
        f"{report.run_stopped(run_id, stopped)}. End this agent. A new agent with the same run id resumes "
        "the job.",
    )


def not_needed(run_id: str, closed: Closed, node: Node) -> Refusal:
    """Return the refusal for a node on standby when its run is closed."""
    return Refusal(
        Reason.NODE_NOT_NEEDED,
        f"{report.run_closed(run_id, closed)}, while node {node} stood by; it was not needed.",
    )


def superseded(ask: JoinRendezvous, node: Node) -> Refusal:
    """Return the refusal for an older attempt of a node."""
    return Refusal(
        Reason.SUPERSEDED,
        f"attempt {ask.attempt} of node {node} to join run {ask.run_id}: it has made attempt "
        f"{node.attempt} since. End the older one.",
    )


def not_in_round(ask: JoinRendezvous, gone: Departed | None) -> Refusal:
    """Return the refusal for a node that asks for a round that it is no longer in."""
    why = f" ({gone.reason})" if gone is not None else ""
    return Refusal(
        Reason.NODE_REMOVED,
        f"node {report.node_name(ask.node)} is not in round {ask.round} of run {ask.run_id} any "
        f"more{why}. End its workers, and join again.",
    )


def node_evicted(run_id: str, node: NodeInfo, why: str = "") -> Refusal:
    """Return the refusal for a node that was evicted.

    Args:
        run_id: the run.
        node: the node.
        why: the requester and the reason, for people; empty: unknown.
    """
    return Refusal(
        Reason.NODE_EVICTED,
        f"node {report.node_name(node)} was evicted from run {run_id}{f' {why}' if why else ''}. End this "
        "agent; a new one may join.",
    )


def node_not_found(run_id: str, node_name: str, nodes: Iterable[Node]) -> Refusal:
    """Return the refusal to evict a node on which the run has no agent."""
    names = list(dict.fromkeys(report.shown(node.info.node_name) for node in nodes))
    return Refusal(
        Reason.NODE_NOT_FOUND,
        f'run {run_id} has no agent on node "{report.shown(node_name)}"; it has agents on '
        f"{report.first_names(names) or 'no node'}. Use one of these names.",
    )


def no_spare(run_id: str, node_name: str, evicted: int, spares: int) -> Refusal:
    """Return the refusal to evict nodes that no other nodes could replace."""
    return Refusal(
        Reason.NO_SPARE,
        f"run {run_id} has {report.agents(evicted)} in its round on node {report.shown(node_name)}, and "
        f"{report.agents(spares)} of other nodes on standby. Nothing was evicted. Start "
        f"{report.agents(evicted - spares)} more on other nodes, and try again.",
        evicted=evicted,
        spares=spares,
    )


def nothing_to_replace(run_id: str, closed: Closed | None, stopped: Stopped | None) -> Refusal:
    """Return the refusal to evict a node of a run that forms no further round by itself."""
    if closed is not None:
        reason, state = Reason.RUN_CLOSED, report.run_closed(run_id, closed)
    else:
        assert stopped is not None
        reason, state = Reason.RUN_STOPPED, report.run_stopped(run_id, stopped)
    return Refusal(reason, f"{state}. Its agents end by themselves, and nothing was evicted.")


def left(run_id: str, node: Node) -> Refusal:
    """Return why the stream of a node that left ends."""
    return Refusal(
        Reason.NODE_REMOVED,
        f"node {node} has left run {run_id}; its place is given up. To come back, join again.",
    )


def replaced(node: Node) -> Refusal:
    """Return why a stream ends whose node has joined on another one."""
    return Refusal(Reason.SESSION_REPLACED, f"node {node} has joined on another stream; this one is over.")


def settings_of_earlier(run_id: str, node: Node, ask: JoinRendezvous) -> Refusal:
    """Return the refusal for a node with a place that wants another number of nodes than an earlier one."""
    return Refusal(
        Reason.SETTINGS_DIFFER,
        f"node {node} asks for {report.nodes_wanted(node.settings)}, and node "
        f"{report.node_name(ask.node)} of run {run_id}, which asked earlier, for "
        f"{report.nodes_wanted(ask.settings)}. Start every node with the same --nnodes.",
    )


def settings_differ(ask: JoinRendezvous, agreed: RendezvousSettings, others: list[Node]) -> Refusal:
    """Return the refusal for a node that wants another number of nodes than those with a place."""
    text = (
        f"node {report.node_name(ask.node)} asks for {report.nodes_wanted(ask.settings)}, and the "
        f"nodes of run {ask.run_id} for {report.nodes_wanted(agreed)}. Start every node with "
        "the same --nnodes."
    )
    if all(node.session is None for node in others):
        longest = max(node.settings.keep_alive_timeout for node in others)
        text += (
            " The connections of these nodes are lost at present; their places are given up "
            f"{report.seconds(longest)} after that, and then the node may join."
        )
    return Refusal(Reason.SETTINGS_DIFFER, text)
