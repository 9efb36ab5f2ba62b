"""BarrierService over a real driver."""

import asyncio

import pytest

from muster.service.driver import Driver
from muster.service.rpc.servicers.barrier import BarrierServicer
from muster.v1 import barrier_pb2 as pb


@pytest.fixture
def servicer(driver: Driver) -> BarrierServicer:
    return BarrierServicer(driver)


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
