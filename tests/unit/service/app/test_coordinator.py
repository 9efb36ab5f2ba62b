"""The end of a coordinator: no change is half done when another replica may lead."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from lab.patience import PATIENCE
from lab.processes.coordinator import free_port
from muster.service.address import Address
from muster.service.app import coordinator
from muster.service.app.context import AppContext
from muster.service.app.coordinator import ReplicaHooks
from muster.service.app.ports import open_security
from muster.service.config import Config
from muster.service.storage.engine import StorageError
from muster.service.telemetry.metrics import Metrics
from muster.v1 import store_pb2, store_pb2_grpc
from tests.support.world.held_engine import HeldEngine


@dataclass(slots=True)
class Running:
    """A coordinator in this loop with a commit in flight."""

    engine: HeldEngine
    stop: asyncio.Event
    retired: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None
    change: "asyncio.Future[store_pb2.SetResponse] | None" = None

    async def ends(self) -> None:
        """Wait for the end of the coordinator, and raise its error."""
        assert self.task is not None
        await asyncio.wait_for(asyncio.shield(self.task), PATIENCE)


async def _answer(call: Awaitable[store_pb2.SetResponse]) -> store_pb2.SetResponse:
    return await call


@asynccontextmanager
async def committing(drain_grace: float) -> AsyncIterator[Running]:
    """Run a coordinator that is changing a key."""
    listen = Address("127.0.0.1", free_port())
    config = Config(listen=listen, http=Address("127.0.0.1", 0), state="memory:", drain_grace=drain_grace)
    running = Running(HeldEngine(), asyncio.Event())
    serving = asyncio.Event()

    async def serves() -> None:
        serving.set()

    async def retired() -> None:
        running.retired.set()

    context = AppContext(config, open_security(config.security), Metrics(), running.stop)
    hooks = ReplicaHooks(on_serving=serves, on_retired=retired)
    running.task = asyncio.create_task(coordinator.run(context, running.engine, hooks))
    await asyncio.wait_for(serving.wait(), PATIENCE)
    request = store_pb2.SetRequest(
        run_id="job",
        entries=[store_pb2.KeyValue(key="k", value=b"v")],
        operation=store_pb2.OperationId(client="c", number=1),
    )
    async with grpc.aio.insecure_channel(str(listen)) as channel:
        stub: Any = store_pb2_grpc.StoreServiceStub(channel)
        running.change = asyncio.create_task(_answer(stub.Set(request, timeout=PATIENCE)))
        try:
            yield running
        finally:
            running.stop.set()
            await asyncio.wait([running.task, running.change])


async def test_coordinator_steps_down_only_after_its_last_commit():
    async with committing(drain_grace=PATIENCE) as running:
        commit = await running.engine.begun.get()
        running.stop.set()
        with pytest.raises(TimeoutError):
            # Long enough for a faulty coordinator to step down.
            await asyncio.wait_for(running.retired.wait(), 0.1)
        commit.end()
        assert running.change is not None
        await running.change
        await asyncio.wait_for(running.retired.wait(), PATIENCE)
        await running.ends()


async def test_hanging_commit_does_not_keep_clients_from_the_next_leader():
    async with committing(drain_grace=0.1) as running:
        commit = await running.engine.begun.get()
        running.stop.set()
        await asyncio.wait_for(running.retired.wait(), PATIENCE)
        assert running.change is not None
        with pytest.raises(grpc.aio.AioRpcError):
            await running.change
        commit.end()
        await running.ends()


async def test_coordinator_raises_the_error_of_its_last_commit():
    async with committing(drain_grace=PATIENCE) as running:
        commit = await running.engine.begun.get()
        running.stop.set()
        commit.end(StorageError("the disk is full"))
        with pytest.raises(StorageError, match="the disk is full"):
            await running.ends()
        assert running.change is not None
        with pytest.raises(grpc.aio.AioRpcError):
            await running.change
