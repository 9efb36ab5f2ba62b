"""BarrierService over a real driver."""

import asyncio

import pytest

from muster.service.driver import Driver
from muster.service.rpc.interceptors.guard import Admission
from muster.service.rpc.interceptors.unsent import Answers, NoPlace
from muster.service.rpc.servicers.barrier import BarrierServicer
from muster.v1 import barrier_pb2 as pb
from muster.v1 import common_pb2
from tests.support.admitted import admitted


@pytest.fixture
def servicer(driver: Driver) -> BarrierServicer:
    return BarrierServicer(driver)


async def arrive(
    servicer: BarrierServicer, rank: int, sequence: int, payload: bytes | None = None
) -> pb.ArriveResponse:
    request = pb.ArriveRequest(
        run_id="job",
        prefix="p",
        rank=rank,
        world_size=2,
        sequence=sequence,
        timeout_ms=60_000,
        payload=b"%d" % rank if payload is None else payload,
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


async def test_outcome_without_a_place_in_memory_is_not_made(servicer: BarrierServicer):
    answers = Answers(most_of_one=120_000)
    with admitted(Admission(peer="10.0.0.7", answers=answers)), answers.place(50_000, "10.0.0.7"):
        arrivals = (arrive(servicer, rank, 0, bytes(50_000)) for rank in range(2))
        refused = await asyncio.gather(*arrivals, return_exceptions=True)
        assert [type(one) for one in refused] == [NoPlace, NoPlace]
    assert (await arrive(servicer, 0, 0, bytes(50_000))).decision.outcome == common_pb2.OUTCOME_RELEASED
