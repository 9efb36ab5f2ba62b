"""Tokens of every role for runs of a team, and a call that begins a run."""

import grpc

from lab.patience import PATIENCE
from muster.service.security.grants import Role
from muster.v1 import barrier_pb2, barrier_pb2_grpc

SECRETS = {role: f"{role.name.lower()}-of-team-a-0123456789" for role in Role}
ANOTHER = "operator-of-all-0123456789"
NODES = '\nnodes = ["node-1", "spot-*"]'
"""The field of the watcher's table."""
ROTATED = "worker-after-rotation-0123456789"


def tokens(*more: str, without: Role | None = None) -> str:
    """Return the text of a tokens file, with more tables and perhaps without a role."""
    tables = [
        f'name = "{role.name.lower()}"\nrole = "{role.name.lower()}"\nruns = ["a-*"]\ntoken = "{secret}"'
        f"{NODES if role is Role.WATCHER else ''}"
        for role, secret in SECRETS.items()
        if role is not without
    ]
    tables.append(f'name = "all"\nrole = "operator"\ntoken = "{ANOTHER}"')
    return "\n".join(f"[[token]]\n{table}\n" for table in [*tables, *more])


def bearing(token: str) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a call with a token."""
    return (("authorization", f"Bearer {token}"),)


def arrive_alone(connection: grpc.Channel, run_id: str) -> None:
    """Begin a run by one arrival, with the token for all runs."""
    request = barrier_pb2.ArriveRequest(run_id=run_id, prefix="p", world_size=1, timeout_ms=5_000)
    barrier_pb2_grpc.BarrierServiceStub(connection).Arrive(
        request, metadata=bearing(ANOTHER), timeout=PATIENCE
    )
