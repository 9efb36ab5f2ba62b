"""Health checks: what is served, until the drain."""

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc.servicers import health
from muster.service.rpc.servicers.health import HealthServicer

NAME = "muster.v1.RunService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Aborted(Exception):
    """What gRPC raises in a handler that aborts."""


class Context:
    def __init__(self, address: str = "10.0.0.7") -> None:
        self._address = address

    def peer(self) -> str:
        return f"ipv4:{self._address}:41822"

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(code, details)


def request(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def check(servicer: HealthServicer, service: str) -> Any:
    return (await servicer.Check(request(service), Context())).status


async def test_every_service_is_served_until_the_drain():
    servicer = HealthServicer([NAME])
    assert [await check(servicer, name) for name in ("", NAME)] == [SERVING] * 2
    servicer.drain()
    assert [await check(servicer, name) for name in ("", NAME)] == [NOT_SERVING] * 2


async def test_list_names_them_all():
    servicer = HealthServicer([NAME])
    listed = await servicer.List(health_pb2.HealthListRequest(), Context())
    assert {name: status.status for name, status in listed.statuses.items()} == {"": SERVING, NAME: SERVING}


async def test_service_that_is_not_there_is_not_found():
    with pytest.raises(Aborted) as caught:
        await check(HealthServicer([NAME]), "none\x1b" + "x" * 10_000)
    code, details = caught.value.args
    assert code is grpc.StatusCode.NOT_FOUND
    assert 'no service "none\\x1bxxx' in details
    assert NAME in details
    assert len(details) < 1_000


@pytest.mark.parametrize(
    ("name", "expected"),
    [(NAME, [SERVING, NOT_SERVING]), ("none", [health_pb2.HealthCheckResponse.SERVICE_UNKNOWN])],
)
async def test_watch_ends_with_the_drain(name: str, expected: list[Any]):
    servicer, seen = HealthServicer([NAME]), []
    with pytest.raises(Refusal) as caught:
        async for response in servicer.Watch(request(name), Context()):
            seen.append(response.status)
            servicer.drain()
    assert caught.value.reason is Reason.COORDINATOR_DRAINING
    assert seen == expected


async def test_so_many_may_watch(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health, "MAX_WATCHERS", 1)
    servicer = HealthServicer([NAME])
    first = servicer.Watch(request(""), Context())
    await anext(first)
    with pytest.raises(Refusal, match="max_watchers is 1"):
        await anext(servicer.Watch(request(""), Context()))
    await first.aclose()
    assert (await anext(servicer.Watch(request(""), Context()))).status == SERVING


async def test_watches_of_one_address_leave_room_for_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(health, "MAX_WATCHERS_PER_ADDRESS", 1)
    servicer = HealthServicer([NAME])
    first = servicer.Watch(request(""), Context())
    await anext(first)
    with pytest.raises(Refusal, match="max_watchers_per_address is 1"):
        await anext(servicer.Watch(request(""), Context()))
    assert (await anext(servicer.Watch(request(""), Context("10.0.0.8")))).status == SERVING
    await first.aclose()
    assert (await anext(servicer.Watch(request(""), Context()))).status == SERVING
