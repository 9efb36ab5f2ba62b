"""BarrierService over a real driver."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from muster.service.clock import SystemClock
from muster.service.core.limits import Limits
from muster.service.driver import Driver
from muster.service.rpc.barrier import BarrierServicer
from muster.service.rpc.codec import encode_session_message
from muster.service.storage.memory import MemoryEngine
from muster.service.telemetry.observers import Observers
from muster.v1 import barrier_pb2 as pb


@pytest.fixture
async def servicer() -> AsyncIterator[BarrierServicer]:
    driver = Driver(
        MemoryEngine(),
        clock=SystemClock(),
        observer=Observers(),
        encode=encode_session_message,
        session_ttl=10.0,
        limits=Limits(),
    )
    yield BarrierServicer(driver)
    await driver.close()


async def arrive(servicer: BarrierServicer, rank: int, sequence: int) -> pb.ArriveResponse:
    request = pb.ArriveRequest(
        run_id="job",
        prefix="p",
        rank=rank,
        world_size=2,
        sequence=sequence,
        timeout_ms=60_000,
        payload=b"%d" % rank,
        incarnation=f"r{rank}",
    )
    return await servicer.Arrive(request, None)


async def test_ranks_share_one_response_with_all_payloads(servicer: BarrierServicer):
    for sequence in range(2):
        zero, one = await asyncio.gather(*(arrive(servicer, rank, sequence) for rank in range(2)))
        assert zero is one
        assert zero.decision.sequence == sequence
        assert [(payload.rank, payload.data) for payload in zero.decision.payloads] == [(0, b"0"), (1, b"1")]
    assert await arrive(servicer, 0, 1) is zero
