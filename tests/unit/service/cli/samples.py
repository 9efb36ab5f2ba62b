"""Answers of a coordinator, as the tests of the command need them."""

from muster.v1 import barrier_pb2, common_pb2, local_pb2, rendezvous_pb2, run_pb2

DECIDED_AT = 1_790_000_000


def missing(rank: int, *, host: str = "node-1", state: int = 2, gone_ms: int = 0) -> common_pb2.MissingRank:
    return common_pb2.MissingRank(
        rank=rank,
        host=host,
        pid=4000 + rank if host else 0,
        state=common_pb2.MissingState.ValueType(state),
        gone_ms=gone_ms,
        last_sequence=6,
    )


def waiting(*absent: common_pb2.MissingRank, prefix: str = "checkpoint", **more) -> barrier_pb2.Barrier:
    given = {"run_id": "job1", "sequence": 7, "required": 16, "age_ms": 41_000, "remaining_ms": 259_000}
    return barrier_pb2.Barrier(
        **{
            **given,
            "prefix": prefix,
            "arrived": 16 - len(absent),
            "missing": absent,
            "message": f'barrier "{prefix}" #7 of run job1 has waited 41 s',
            **more,
        }
    )


def decided(
    *absent: common_pb2.MissingRank,
    outcome: int = common_pb2.OUTCOME_TIMED_OUT,
    message: str = 'barrier "checkpoint" #6 of run job1 timed out after 300 s\n  arrived 15 of 16',
    at: int = DECIDED_AT,
    **more,
) -> barrier_pb2.Barrier:
    decision = common_pb2.Decision(
        run_id="job1",
        prefix="checkpoint",
        sequence=6,
        outcome=common_pb2.Outcome.ValueType(outcome),
        message=message,
        missing=absent,
        arrived=16 - len(absent),
        required=16,
        wait_ms=300_000,
        skew_ms=12,
        last_arrival_rank=5,
        **more,
    )
    decision.decided_at.FromSeconds(at)
    return barrier_pb2.Barrier(
        run_id="job1",
        prefix="checkpoint",
        sequence=6,
        arrived=16 - len(absent),
        required=16,
        missing=absent,
        decision=decision,
        message=message,
    )


def member(rank: int, *, state: int = 1, host: str = "node-0", **more) -> run_pb2.Member:
    return run_pb2.Member(
        rank=rank,
        incarnation=f"life-{rank}",
        ordinal=rank + 1,
        host=host,
        pid=4000 + rank,
        state=common_pb2.MemberState.ValueType(state),
        since_ms=65_000,
        groups=[
            run_pb2.GroupPosition(prefix="checkpoint", last_sequence=6),
            run_pb2.GroupPosition(prefix="eval"),
        ],
        **more,
    )


def run(run_id: str = "job1", **more) -> run_pb2.Run:
    given = {"connected": 15, "members": 16, "groups": 2, "open_barriers": 1, "decided_barriers": 7}
    return run_pb2.Run(run_id=run_id, **{**given, **more})


def checkpoints(*, failures: int = 0, **more) -> run_pb2.Checkpoints:
    newest = run_pb2.Checkpoint(
        step=1_200,
        bytes=96 << 30,
        slowest=run_pb2.SlowestWrite(rank=3, host="node-0", write_ms=12_400),
        barrier=common_pb2.BarrierName(prefix="save/commit", sequence=11),
    )
    newest.committed_at.FromSeconds(DECIDED_AT)
    failed = run_pb2.FailedSave(
        step=1_100,
        reason="was aborted: rank 3 failed: disk\x1b[2J full",
        barrier=common_pb2.BarrierName(prefix="save", sequence=10),
    )
    failed.failed_at.FromSeconds(DECIDED_AT)
    given = {"newest": newest, "age_ms": 252_000, "committed": 12, "interval_ms": 600_000}
    return run_pb2.Checkpoints(failures=[failed] * failures, **{**given, **more})


def closed(by: str = "ann@desk", reason: str = "the budget is spent") -> common_pb2.Closed:
    how = common_pb2.Closed(by=by, reason=reason)
    how.closed_at.FromSeconds(DECIDED_AT)
    return how


def node(number: int, *, address: str = "") -> rendezvous_pb2.Node:
    return rendezvous_pb2.Node(
        incarnation=f"agent-{number}", address=address or f"node-{number}", pid=900 + number
    )


def place(
    number: int,
    standing: rendezvous_pb2.NodeStanding.ValueType = rendezvous_pb2.NODE_STANDING_PARTICIPANT,
    *,
    address: str = "",
    **more,
) -> rendezvous_pb2.NodeView:
    shown = {"connected": True, "since_ms": 65_000, **more}
    return rendezvous_pb2.NodeView(node=node(number, address=address), standing=standing, **shown)


def completed_round(number: int, *, nodes: int = 2) -> rendezvous_pb2.Round:
    one = rendezvous_pb2.Round(round=number, world_size=nodes, join_ms=2_500)
    one.completed_at.FromSeconds(DECIDED_AT + number)
    return one


def rendezvous(*nodes: rendezvous_pb2.NodeView, **more) -> rendezvous_pb2.Rendezvous:
    given = {"run_id": "job1", "min_nodes": 2, "max_nodes": 4, "message": "round 0 comes together"}
    return rendezvous_pb2.Rendezvous(nodes=nodes, **{**given, **more})


def keeper(number: int, *held: local_pb2.Holding, domain: str = "", **more) -> local_pb2.KeeperView:
    given = {
        "connected": True,
        "ranks": [2 * number, 2 * number + 1],
        "disk": local_pb2.Disk(used=12 << 30, quota=40 << 30),
    }
    return local_pb2.KeeperView(
        keeper=local_pb2.Keeper(
            id=f"keeper-{number}",
            url=f"http://10.0.0.{number}:40123",
            failure_domain=domain,
            node_name=f"node-{number}",
            version="0.1.0",
        ),
        holdings=held,
        **{**given, **more},
    )


def holding(*ranks: int, number: int = 17) -> local_pb2.Holding:
    return local_pb2.Holding(
        attempt=local_pb2.Attempt(generation=2, number=number), manifest_digest=b"digest", ranks=ranks
    )


def local_checkpoint(
    level: local_pb2.DurabilityLevel.ValueType = local_pb2.DURABILITY_LEVEL_REPLICATED,
    *,
    number: int = 17,
    step: int = 340,
    **more,
) -> local_pb2.LocalCheckpointView:
    checkpoint = local_pb2.LocalCheckpoint(
        attempt=local_pb2.Attempt(generation=2, number=number),
        step=step,
        world_size=4,
        manifest_digest=b"digest",
        replicas=1,
        size=3 << 30,
    )
    return local_pb2.LocalCheckpointView(checkpoint=checkpoint, level=level, **{"age_seconds": 41.0, **more})


def local_checkpoints(
    checkpoints: list[local_pb2.LocalCheckpointView], keepers: list[local_pb2.KeeperView]
) -> local_pb2.LocalCheckpointServiceListResponse:
    return local_pb2.LocalCheckpointServiceListResponse(checkpoints=checkpoints, keepers=keepers)
