"""The services' stubs on an asyncio channel, with the types of what they do there.

The generated stubs are declared for a blocking channel; what an asyncio channel makes of them is declared
beside them, as classes that exist for type checkers alone.
"""

from typing import Any, TypeVar, cast

import grpc.aio

from muster.v1 import (
    barrier_pb2_grpc,
    coordinator_pb2_grpc,
    rendezvous_pb2_grpc,
    run_pb2_grpc,
    session_pb2_grpc,
    store_pb2_grpc,
)

Response = TypeVar("Response")


def barriers(channel: grpc.aio.Channel) -> "barrier_pb2_grpc.BarrierServiceAsyncStub":
    """The barriers of runs."""
    return cast("barrier_pb2_grpc.BarrierServiceAsyncStub", barrier_pb2_grpc.BarrierServiceStub(channel))


def coordinators(channel: grpc.aio.Channel) -> "coordinator_pb2_grpc.CoordinatorServiceAsyncStub":
    """How the coordinator is."""
    return cast(
        "coordinator_pb2_grpc.CoordinatorServiceAsyncStub",
        coordinator_pb2_grpc.CoordinatorServiceStub(channel),
    )


def rendezvous(channel: grpc.aio.Channel) -> "rendezvous_pb2_grpc.RendezvousServiceAsyncStub":
    """The rendezvous of runs."""
    return cast(
        "rendezvous_pb2_grpc.RendezvousServiceAsyncStub",
        rendezvous_pb2_grpc.RendezvousServiceStub(channel),
    )


def runs(channel: grpc.aio.Channel) -> "run_pb2_grpc.RunServiceAsyncStub":
    """Runs and their members."""
    return cast("run_pb2_grpc.RunServiceAsyncStub", run_pb2_grpc.RunServiceStub(channel))


def sessions(channel: grpc.aio.Channel) -> "session_pb2_grpc.SessionServiceAsyncStub":
    """The streams of workers."""
    return cast("session_pb2_grpc.SessionServiceAsyncStub", session_pb2_grpc.SessionServiceStub(channel))


def stores(channel: grpc.aio.Channel) -> "store_pb2_grpc.StoreServiceAsyncStub":
    """The stores of runs."""
    return cast("store_pb2_grpc.StoreServiceAsyncStub", store_pb2_grpc.StoreServiceStub(channel))


async def read(
    call: grpc.aio.StreamStreamCall[Any, Response] | grpc.aio.UnaryStreamCall[Any, Response],
) -> Response | None:
    """The next message of a stream; None when it has ended."""
    message = await call.read()
    return None if message is grpc.aio.EOF else cast(Response, message)
