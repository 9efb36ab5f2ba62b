"""Ranks of which a coordinator knows the node."""

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from muster.v1 import session_pb2, session_pb2_grpc


@contextmanager
def rank_on(
    connection: grpc.Channel,
    node_name: str,
    run_id: str,
    rank: int = 0,
    metadata: Sequence[tuple[str, str]] = (),
) -> Iterator[None]:
    """Connect a rank from a node."""
    said: queue.SimpleQueue[session_pb2.ConnectRequest | None] = queue.SimpleQueue()
    process = session_pb2.Process(
        rank=rank, incarnation=f"{run_id}-{rank}", host="h", pid=1, node_name=node_name
    )
    hello = session_pb2.Hello(run_id=run_id, processes=[process], protocol_version=1)
    said.put(session_pb2.ConnectRequest(hello=hello))
    stub = session_pb2_grpc.SessionServiceStub(connection)
    stream = stub.Connect(iter(said.get, None), metadata=tuple(metadata))
    next(stream)
    try:
        yield
    finally:
        said.put(None)
        stream.cancel()
