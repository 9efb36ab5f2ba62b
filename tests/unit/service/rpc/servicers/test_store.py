"""StoreService over a real driver: messages in, messages out."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from muster.client.protocol import MAX_ENTRIES
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.driver import Driver
from muster.service.rpc.interceptors.guard import Admission
from muster.service.rpc.interceptors.unsent import Answers, NoPlace
from muster.service.rpc.servicers import store
from muster.service.rpc.servicers.store import StoreServicer
from muster.v1 import store_pb2 as pb
from tests.support.admitted import admitted


class Service:
    """Asks a servicer as gRPC would."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.servicer = StoreServicer(driver)

    async def __call__(self, method: str, **fields):
        request_name = {"Get": "StoreServiceGetRequest"}.get(method, f"{method}Request")
        request = getattr(pb, request_name)(run_id="job", **fields)
        return await getattr(self.servicer, method)(request, None)

    async def refused(self, method: str, **fields) -> Refusal:
        with pytest.raises(Refusal) as caught:
            await self(method, **fields)
        return caught.value


@pytest.fixture
def ask(driver: Driver) -> Service:
    return Service(driver)


def entry(key: str, value: bytes) -> pb.KeyValue:
    return pb.KeyValue(key=key, value=value)


async def test_each_operation_is_carried_out_and_answered(ask: Service):
    assert await ask("Set", entries=[entry("a", b"1"), entry("b", b"2")]) == pb.SetResponse()
    assert (await ask("Get", keys=["b", "a"], timeout_ms=1000)).values == [b"2", b"1"]
    assert await ask("Wait", keys=["a"], timeout_ms=1000) == pb.WaitResponse()
    assert (await ask("Check", keys=["a", "c"])).present is False
    assert (await ask("Add", key="n", amount=-4)).value == -4
    assert (await ask("CompareSet", key="a", expected=b"1", desired=b"9")).value == b"9"
    assert await ask("Append", key="a", value=b"!") == pb.AppendResponse()
    assert (await ask("Delete", key="b")).existed is True
    assert (await ask("ListKeys")).keys == ["a", "n"]
    assert (await ask("NumKeys")).count == 2
    assert (await ask("Get", keys=["a"], timeout_ms=1000)).values == [b"9!"]


@pytest.mark.parametrize(
    ("method", "fields"),
    [
        ("Set", {"entries": [entry("k", b"5")]}),
        ("Add", {"key": "k", "amount": 5}),
        ("CompareSet", {"key": "k", "desired": b"5"}),
        ("Append", {"key": "k", "value": b"5"}),
    ],
)
async def test_every_change_may_name_itself_and_is_then_carried_out_once(
    ask: Service, method: str, fields: dict[str, Any]
):
    operation = pb.OperationId(client="c", number=1)
    first = await ask(method, **fields, operation=operation)
    assert (await ask("Delete", key="k")).existed
    assert await ask(method, **fields, operation=operation) == first
    assert not (await ask("Check", keys=["k"])).present


async def test_removal_may_name_itself_too(ask: Service):
    operation = pb.OperationId(client="c", number=1)
    await ask("Set", entries=[entry("k", b"")])
    assert (await ask("Delete", key="k", operation=operation)).existed
    assert (await ask("Delete", key="k", operation=operation)).existed


async def test_change_without_an_operation_id_is_carried_out_each_time(ask: Service):
    assert [(await ask("Add", key="n", amount=1)).value for _ in range(2)] == [1, 2]


async def test_wait_is_answered_when_another_client_sets_the_key(ask: Service):
    waiting = asyncio.create_task(ask("Get", keys=["k"], timeout_ms=0))
    await ask("NumKeys")
    assert not waiting.done()
    await ask("Set", entries=[entry("k", b"v")])
    assert (await waiting).values == [b"v"]


async def test_wait_that_is_hung_up_is_forgotten(ask: Service):
    waiting = asyncio.create_task(ask("Wait", keys=["k"], timeout_ms=60_000))
    await ask("NumKeys")
    store = ask.driver.coordinator.runs["job"].store
    assert len(store.waiters) == 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await ask("NumKeys")
    assert store.waiters == {}


async def test_wait_ends_at_the_coordinators_deadline(ask: Service):
    assert (await ask.refused("Wait", keys=["k"], timeout_ms=5)).reason is Reason.STORE_TIMED_OUT


async def test_drain_ends_waiting_calls_but_not_writes(ask: Service):
    waiting = asyncio.create_task(ask.refused("Get", keys=["k"], timeout_ms=60_000))
    await ask("NumKeys")
    ask.servicer.drain()
    assert (await waiting).reason is Reason.COORDINATOR_DRAINING
    assert (await ask.refused("Wait", keys=["k"], timeout_ms=1)).reason is Reason.COORDINATOR_DRAINING
    assert (await ask("Add", key="n", amount=1)).value == 1


@pytest.mark.parametrize("method", ["Get", "Wait", "Check"])
async def test_message_has_bounds(ask: Service, method: str):
    refusal = await ask.refused(method, keys=[""] * (MAX_ENTRIES + 1))
    assert refusal.metadata == {"field": "keys"}


async def test_set_has_bounds(ask: Service):
    refusal = await ask.refused("Set", entries=[entry("", b"")] * (MAX_ENTRIES + 1))
    assert refusal.metadata == {"field": "entries"}


# ---------------------------------------------------------------------- on a stream

ID = pb.OperationId(client="c", number=1)


class Stream:
    """An open stream of operations, driven from both ends."""

    def __init__(self, servicer: StoreServicer) -> None:
        self._said: asyncio.Queue[pb.OperateRequest | None] = asyncio.Queue()
        self._answers = servicer.Operate(self._requests(), None)

    async def _requests(self) -> AsyncIterator[pb.OperateRequest]:
        while (request := await self._said.get()) is not None:
            yield request

    async def __call__(self, **operation: Any) -> pb.OperateResponse | None:
        self._said.put_nowait(pb.OperateRequest(**operation))
        return await self.next()

    async def next(self) -> pb.OperateResponse | None:
        return await anext(self._answers, None)

    def close(self) -> None:
        self._said.put_nowait(None)


async def test_operations_on_a_stream_are_carried_out_one_after_another(ask: Service):
    on = Stream(ask.servicer)
    named = pb.SetRequest(run_id="job", entries=[entry("a", b"1")], operation=ID)
    assert await on(set=named) == pb.OperateResponse(set=pb.SetResponse())
    answers: dict[str, tuple[Any, dict[str, Any]]] = {
        "get": (pb.StoreServiceGetRequest(run_id="job", keys=["a"]), {"values": [b"1"]}),
        "wait": (pb.WaitRequest(run_id="job", keys=["a"]), {}),
        "check": (pb.CheckRequest(run_id="job", keys=["b"]), {"present": False}),
        "add": (pb.AddRequest(run_id="job", key="n", amount=2), {"value": 2}),
        "compare_set": (pb.CompareSetRequest(run_id="job", key="c", desired=b"d"), {"value": b"d"}),
        "append": (pb.AppendRequest(run_id="job", key="a", value=b"2"), {}),
        "delete": (pb.DeleteRequest(run_id="job", key="c"), {"existed": True}),
        "delete_prefix": (pb.DeletePrefixRequest(run_id="job", prefix="n"), {"count": 1}),
        "list_keys": (pb.ListKeysRequest(run_id="job"), {"keys": ["a"]}),
        "num_keys": (pb.NumKeysRequest(run_id="job"), {"count": 1}),
    }
    assert {field.name for field in pb.OperateRequest.DESCRIPTOR.fields} == {"set", *answers}
    for number, (name, (request, answer)) in enumerate(answers.items(), 2):
        if isinstance(request, pb.AddRequest | pb.CompareSetRequest | pb.AppendRequest | pb.DeleteRequest):
            request.operation.CopyFrom(pb.OperationId(client="c", number=number))
        response: Any = await on(**{name: request})
        expected = type(getattr(response, name))(**answer)
        assert response == pb.OperateResponse(**{name: expected}), name
    on.close()
    assert await on.next() is None


@pytest.mark.parametrize(
    "operation",
    [{}, {"set": pb.SetRequest(run_id="job")}, {"add": pb.AddRequest(run_id="job", key="k", amount=1)}],
)
async def test_change_without_an_operation_id_is_refused_on_a_stream(ask: Service, operation: dict[str, Any]):
    with pytest.raises(Refusal) as caught:
        await Stream(ask.servicer)(**operation)
    assert caught.value.metadata == {"field": "operation"}
    assert (await ask("NumKeys")).count == 0


async def test_stream_ends_by_itself_when_nothing_comes(ask: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store, "IDLE", 0.01)
    on = Stream(ask.servicer)
    assert await on(num_keys=pb.NumKeysRequest(run_id="job"))
    assert await on.next() is None


async def test_drain_ends_idle_streams_and_refuses_new_ones(ask: Service):
    on = Stream(ask.servicer)
    await on(num_keys=pb.NumKeysRequest(run_id="job"))
    idle = asyncio.create_task(on.next())
    await asyncio.sleep(0)
    ask.servicer.drain()
    assert await idle is None
    with pytest.raises(Refusal) as caught:
        await Stream(ask.servicer)(num_keys=pb.NumKeysRequest(run_id="job"))
    assert caught.value.reason is Reason.COORDINATOR_DRAINING


async def test_read_that_has_no_place_in_memory_is_not_made(ask: Service):
    await ask("Set", entries=[entry("a", bytes(50_000)), entry("b", bytes(50_000))])
    answers = Answers(most_of_one=120_000)
    with admitted(Admission(peer="10.0.0.7", answers=answers)), answers.place(50_000, "10.0.0.7"):
        with pytest.raises(NoPlace) as caught:
            await ask("Get", keys=["a", "b"], timeout_ms=1000)
        assert caught.value.size == 100_000
        assert (await ask("Get", keys=["a"], timeout_ms=1000)).values == [bytes(50_000)]
