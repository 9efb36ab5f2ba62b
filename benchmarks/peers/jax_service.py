"""JAX's coordination service: a server of its own, and a client for each rank."""

import signal
import sys

from jaxlib import _jax

from benchmarks.peers.base import BARRIER_TIMEOUT_S, Barrier, BlockingLoad, LoadSpec

HEARTBEAT_TIMEOUT_S = 100  # what jax.distributed.initialize passes
ADDRESSES_PER_SUBNET = 250


def open_load(spec: LoadSpec) -> BlockingLoad:
    """Return ranks that hold a coordination service client each.

    gRPC lets the clients of one process that go to one address share a connection. Ranks are processes of
    their own in a real job, so each connection gets a loopback address of its own.
    """

    def connect(rank: int) -> Barrier:
        client = _jax.get_distributed_runtime_client(
            f"{_loopback_address(rank // spec.ranks_per_connection)}:{spec.port}",
            rank,
            init_timeout=BARRIER_TIMEOUT_S,
            heartbeat_timeout=HEARTBEAT_TIMEOUT_S,
            shutdown_on_destruction=False,
            use_compression=True,
        )
        client.connect()
        return lambda sequence: client.wait_at_barrier("checkpoint", BARRIER_TIMEOUT_S * 1000)

    return BlockingLoad(spec.ranks, connect)


def _loopback_address(connection: int) -> str:
    subnet, host = divmod(connection, ADDRESSES_PER_SUBNET)
    return f"127.0.{subnet}.{host + 1}"


def main() -> None:
    """Serve until killed; the arguments are the port and the number of ranks."""
    service = _jax.get_distributed_runtime_service(
        f"[::]:{sys.argv[1]}", int(sys.argv[2]), heartbeat_timeout=HEARTBEAT_TIMEOUT_S
    )
    signal.pause()
    del service


if __name__ == "__main__":
    main()
