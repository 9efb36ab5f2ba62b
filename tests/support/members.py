"""The members of a run, as the coordinator sees them."""

from collections.abc import Sequence

import grpc

from lab.patience import PATIENCE
from muster.v1 import common_pb2, run_pb2, run_pb2_grpc


def members(endpoint: str, run_id: str = "job") -> Sequence[run_pb2.Member]:
    """The newest process of each rank of a run."""
    with grpc.insecure_channel(endpoint) as channel:
        request = run_pb2.MembersRequest(run_id=run_id)
        return run_pb2_grpc.RunServiceStub(channel).Members(request, timeout=PATIENCE).members


def connected(endpoint: str, run_id: str = "job") -> list[int]:
    """The ranks that are there."""
    here = common_pb2.MEMBER_STATE_CONNECTED
    return sorted(one.rank for one in members(endpoint, run_id) if one.state == here)
