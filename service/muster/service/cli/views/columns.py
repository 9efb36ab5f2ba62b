"""The columns of tables of runs, barriers, members, nodes, rounds, local checkpoints and missing ranks."""

from muster.service.cli.views.table import Column, name
from muster.service.core.vocabulary import report
from muster.service.formatting.cells import NOTHING, duration, ranks, size, steps
from muster.service.formatting.checkpoints import step_text
from muster.service.formatting.local_checkpoints import CheckpointRow, KeeperRow
from muster.service.formatting.rounds import RoundRow
from muster.service.wire import milliseconds, missing_from_pb
from muster.v1 import barrier_pb2, common_pb2, coordinator_pb2, rendezvous_pb2, run_pb2


def barrier_state(barrier: barrier_pb2.Barrier) -> str:
    """Return ``OPEN``, or the outcome."""
    if not barrier.HasField("decision"):
        return "OPEN"
    return name(common_pb2.Outcome.DESCRIPTOR, barrier.decision.outcome, "OUTCOME_")


def run_state(run: run_pb2.Run) -> str:
    """Return ``OPEN``, ``STOPPED``, ``CLOSED`` or ``FORGOTTEN``."""
    if run.forgotten:
        return "FORGOTTEN"
    if run.HasField("closed"):
        return "CLOSED"
    return "STOPPED" if run.HasField("stopped") else "OPEN"


def connection(node: rendezvous_pb2.NodeView) -> str:
    """Return whether a node's stream is open, with the states of processes."""
    return "CONNECTED" if node.connected else "DISCONNECTED"


def node_standing(node: rendezvous_pb2.NodeView) -> str:
    """Return a node's place in the rendezvous."""
    return name(rendezvous_pb2.NodeStanding.DESCRIPTOR, node.standing, "NODE_STANDING_")


def node_rank(node: rendezvous_pb2.NodeView) -> str:
    """Return a node's rank in the complete round."""
    return str(node.rank) if node.HasField("rank") else NOTHING


def _round(run: run_pb2.Run) -> str:
    return str(run.round) if run.HasField("round") else NOTHING


def _nodes(run: run_pb2.Run) -> str:
    return str(run.nodes) if run.HasField("round") else NOTHING


def member_node(member: run_pb2.Member) -> str:
    """Return the rank of a process's node."""
    return str(member.node_rank) if member.HasField("node_rank") else NOTHING


def member_step(member: run_pb2.Member) -> str:
    """Return the training step that a process is at."""
    return str(member.step) if member.HasField("step") else NOTHING


def _step_age(member: run_pb2.Member) -> str:
    return duration(member.step_ms) if member.HasField("step") else NOTHING


def run_steps(run: run_pb2.Run) -> str:
    """Return the lowest and the highest training step of a run."""
    return steps(run.steps.lowest, run.steps.highest) if run.HasField("steps") else NOTHING


def _last_commit(run: run_pb2.Run) -> str:
    """Return the age of the newest checkpoint."""
    return duration(run.checkpoints.age_ms) if run.checkpoints.HasField("newest") else NOTHING


def member_state(member: run_pb2.Member) -> str:
    """Return the state of a process."""
    return name(common_pb2.MemberState.DESCRIPTOR, member.state, "MEMBER_STATE_")


def missing_sentence(barrier: barrier_pb2.Barrier) -> str:
    """Name the missing ranks with host, process and reason; empty if no rank is missing."""
    return report.missing_all([missing_from_pb(one) for one in barrier.missing])


def _missing_ranks(barrier: barrier_pb2.Barrier) -> str:
    return ranks(one.rank for one in barrier.missing)


def _waited(barrier: barrier_pb2.Barrier) -> str:
    return duration(barrier.decision.wait_ms if barrier.HasField("decision") else barrier.age_ms)


def _left(barrier: barrier_pb2.Barrier) -> str:
    return NOTHING if barrier.HasField("decision") else duration(barrier.remaining_ms)


def _skew(barrier: barrier_pb2.Barrier) -> str:
    return duration(barrier.decision.skew_ms) if barrier.HasField("decision") else NOTHING


def _last_rank(barrier: barrier_pb2.Barrier) -> str:
    decision = barrier.decision
    return str(decision.last_arrival_rank) if decision.HasField("last_arrival_rank") else NOTHING


def decided_at(barrier: barrier_pb2.Barrier) -> str:
    """Return when a barrier was decided, in UTC."""
    decision = barrier.decision
    return decision.decided_at.ToJsonString() if decision.HasField("decided_at") else NOTHING


def _groups(member: run_pb2.Member) -> str:
    return ",".join(f"{group.prefix}#{last_sequence(group)}" for group in member.groups) or NOTHING


def last_sequence(spoken: run_pb2.GroupPosition | common_pb2.MissingRank) -> str:
    """Return the last sequence at which a process arrived in a group."""
    return str(spoken.last_sequence) if spoken.HasField("last_sequence") else NOTHING


RUNS: list[Column[run_pb2.Run]] = [
    Column(title="RUN", cell=lambda run: run.run_id),
    Column(title="STATE", cell=run_state, state=True),
    Column(title="GENERATION", cell=lambda run: str(run.generation)),
    Column(title="ROUND", cell=_round),
    Column(title="NODES", cell=_nodes),
    Column(title="WAITING", cell=lambda run: str(run.nodes_waiting), wide=True),
    Column(title="CONNECTED", cell=lambda run: f"{run.connected}/{run.members}"),
    Column(title="GROUPS", cell=lambda run: str(run.groups), wide=True),
    Column(title="OPEN", cell=lambda run: str(run.open_barriers)),
    Column(title="DECIDED", cell=lambda run: str(run.decided_barriers)),
    Column(title="STEP", cell=run_steps),
    Column(title="LAST COMMIT", cell=_last_commit, wide=True),
]

BARRIERS: list[Column[barrier_pb2.Barrier]] = [
    Column(title="RUN", cell=lambda barrier: barrier.run_id),
    Column(title="PREFIX", cell=lambda barrier: barrier.prefix),
    Column(title="SEQUENCE", cell=lambda barrier: str(barrier.sequence)),
    Column(title="STATE", cell=barrier_state, state=True),
    Column(title="ARRIVED", cell=lambda barrier: f"{barrier.arrived}/{barrier.required}"),
    Column(title="WAITED", cell=_waited),
    Column(title="LEFT", cell=_left),
    Column(title="GENERATION", cell=lambda barrier: str(barrier.generation), wide=True),
    Column(title="SKEW", cell=_skew, wide=True),
    Column(title="LAST", cell=_last_rank, wide=True),
    Column(title="DECIDED", cell=decided_at, wide=True),
    Column(title="MISSING", cell=_missing_ranks),
    Column(title="WHO", cell=lambda barrier: missing_sentence(barrier) or NOTHING, wide=True),
]

MEMBERS: list[Column[run_pb2.Member]] = [
    Column(title="RANK", cell=lambda member: str(member.rank)),
    Column(title="NODE", cell=member_node),
    Column(title="HOST", cell=lambda member: member.host),
    Column(title="PID", cell=lambda member: str(member.pid)),
    Column(title="STATE", cell=member_state, state=True),
    Column(title="SINCE", cell=lambda member: duration(member.since_ms)),
    Column(title="STEP", cell=member_step),
    Column(title="AT IT FOR", cell=_step_age, wide=True),
    Column(title="NODE NAME", cell=lambda member: member.node_name or NOTHING, wide=True),
    Column(title="GENERATION", cell=lambda member: str(member.generation), wide=True),
    Column(title="ORDINAL", cell=lambda member: str(member.ordinal), wide=True),
    Column(title="INCARNATION", cell=lambda member: member.incarnation, wide=True),
    Column(title="RELAY", cell=lambda member: member.relay or NOTHING, wide=True),
    Column(title="GROUPS", cell=_groups),
]

ROUNDS: list[Column[RoundRow]] = [
    Column(title="ROUND", cell=lambda row: str(row.round)),
    Column(title="STATE", cell=lambda row: row.state, state=True),
    Column(title="NODES", cell=lambda row: row.nodes),
    Column(title="WAITING", cell=lambda row: row.waiting),
    Column(title="STANDING BY", cell=lambda row: row.standing_by, wide=True),
    Column(title="JOINED IN", cell=lambda row: row.joined_in),
    Column(title="COMPLETED AT", cell=lambda row: row.completed_at),
    Column(title="WHO", cell=lambda row: row.who, wide=True),
    Column(title="COPIES", cell=lambda row: row.copies, wide=True),
]

CHECKPOINTS: list[Column[CheckpointRow]] = [
    Column(title="STEP", cell=lambda row: str(row.view.checkpoint.step)),
    Column(title="ATTEMPT", cell=lambda row: row.attempt),
    Column(title="LEVEL", cell=lambda row: row.level, state=True),
    Column(title="AGE", cell=lambda row: duration(milliseconds(row.view.age_seconds))),
    Column(title="SIZE", cell=lambda row: size(row.view.checkpoint.size)),
    Column(title="RANKS", cell=lambda row: str(row.view.checkpoint.world_size), wide=True),
    Column(title="COPIES", cell=lambda row: row.copies),
    Column(title="PERSISTED AS", cell=lambda row: row.view.persisted_as or NOTHING, wide=True),
    Column(title="PENDING", cell=lambda row: row.view.pending or NOTHING),
    Column(title="LOSS", cell=lambda row: row.loss),
]

KEEPERS: list[Column[KeeperRow]] = [
    Column(title="NODE", cell=lambda row: row.node),
    Column(title="STATE", cell=lambda row: row.state, state=True),
    Column(title="RANKS", cell=lambda row: row.ranks),
    Column(title="COPIES TO", cell=lambda row: row.copies_to),
    Column(title="FETCHED FROM", cell=lambda row: row.fetched, wide=True),
    Column(title="DISK", cell=lambda row: row.disk),
    Column(title="DOMAIN", cell=lambda row: row.view.keeper.failure_domain or NOTHING),
    Column(title="VERSION", cell=lambda row: row.view.keeper.version or NOTHING),
    Column(title="URL", cell=lambda row: row.view.keeper.url, wide=True),
    Column(title="ID", cell=lambda row: row.view.keeper.id, wide=True),
]

NODES: list[Column[rendezvous_pb2.NodeView]] = [
    Column(title="RANK", cell=node_rank),
    Column(title="ADDRESS", cell=lambda view: view.node.address),
    Column(title="PID", cell=lambda view: str(view.node.pid)),
    Column(title="PLACE", cell=node_standing),
    Column(title="STATE", cell=connection, state=True),
    Column(title="SINCE", cell=lambda view: duration(view.since_ms)),
    Column(title="INCARNATION", cell=lambda view: view.node.incarnation, wide=True),
]

DEPARTED: list[Column[rendezvous_pb2.DepartedNode]] = [
    Column(title="ADDRESS", cell=lambda gone: gone.node.address),
    Column(title="PID", cell=lambda gone: str(gone.node.pid)),
    Column(title="ROUND", cell=lambda gone: str(gone.round)),
    Column(title="AGO", cell=lambda gone: duration(gone.since_ms)),
    Column(title="INCARNATION", cell=lambda gone: gone.node.incarnation, wide=True),
    Column(title="REASON", cell=lambda gone: gone.reason or NOTHING),
]

REPLICAS: list[Column[coordinator_pb2.Replica]] = [
    Column(title="ADDRESS", cell=lambda replica: replica.address),
    Column(title="STATE", cell=lambda replica: "LEADS" if replica.leads else "STANDS BY", state=True),
    Column(title="VERSION", cell=lambda replica: replica.version),
    Column(title="STARTED", cell=lambda replica: replica.started_at.ToJsonString()),
]

FAILED_SAVES: list[Column[run_pb2.FailedSave]] = [
    Column(title="FAILED AT", cell=lambda failed: failed.failed_at.ToJsonString()),
    Column(title="STEP", cell=step_text),
    Column(title="BARRIER", cell=lambda failed: f"{failed.barrier.prefix}#{failed.barrier.sequence}"),
    Column(title="REASON", cell=lambda failed: failed.reason),
]

MISSING: list[Column[common_pb2.MissingRank]] = [
    Column(title="RANK", cell=lambda one: str(one.rank)),
    Column(title="HOST", cell=lambda one: one.host or NOTHING),
    Column(title="PID", cell=lambda one: str(one.pid) if one.host else NOTHING),
    Column(
        title="STATE", cell=lambda one: name(common_pb2.MissingState.DESCRIPTOR, one.state, "MISSING_STATE_")
    ),
    Column(title="GONE", cell=lambda one: duration(one.gone_ms) if one.gone_ms else NOTHING),
    Column(title="LAST", cell=last_sequence),
]
