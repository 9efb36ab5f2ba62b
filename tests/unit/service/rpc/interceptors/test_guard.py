"""A call is let in before it is parsed, and about the run that it names before it is carried out."""

import asyncio
import gc
import hashlib
from contextlib import suppress
from typing import Any

import grpc
import pytest

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc.interceptors.guard import (
    ADMISSION,
    CROWDED_READ_TIMEOUT,
    FEW,
    SMALL_READ_TIMEOUT,
    Admission,
    GuardInterceptor,
)
from muster.service.rpc.interceptors.open_reads import BARRED_SECONDS, MAX_READS, OPEN_REQUEST_BYTES
from muster.service.rpc.interceptors.open_reads import READ_TIMEOUT as OPEN_READ_TIMEOUT
from muster.service.security.access import Access
from muster.service.security.config import TrafficLimits
from muster.service.security.grants import Grant, Role
from muster.service.security.tokens import Tokens
from muster.service.security.traffic import Traffic
from muster.serving.options import READ_TIMEOUT
from muster.v1 import run_pb2, store_pb2
from tests.support.world.virtual_time import START, in_virtual_time

SECRET = "s3cr3t-0123456789-abcdef"
BEARING = (("authorization", f"Bearer {SECRET}"),)
GET = "/muster.v1.RunService/Get"
WATCH = "/muster.v1.RunService/Watch"
CONNECT = "/muster.v1.SessionService/Connect"
HEALTH = "/grpc.health.v1.Health"


def get(run_id: str) -> run_pb2.RunServiceGetRequest:
    return run_pb2.RunServiceGetRequest(run_id=run_id)


class Serialized(bytes):
    """The bytes of a response, from which a test reads the response."""

    response: Any = None


def serialized(response: Any) -> Serialized:
    data = Serialized()
    data.response = response
    return data


class Context:
    """A call: the messages that its peer sends, and those that it receives."""

    def __init__(self, *sent: bytes) -> None:
        self._sent = list(sent)
        self.heard: list[Any] = []

    def peer(self) -> str:
        return "ipv4:10.0.0.7:1"

    async def read(self) -> Any:
        return self._sent.pop(0) if self._sent else grpc.aio.EOF

    async def write(self, response: Any) -> None:
        self.heard.append(response.response if isinstance(response, Serialized) else response)


class World:
    """One interceptor, and the requests that came through it."""

    def __init__(self, role: Role | None = Role.WORKER, runs: tuple[str, ...] = ("a-*",), **limits: int):
        self.slept: list[float] = []
        self.seen: list[Any] = []
        access = None
        if role is not None:
            digest = hashlib.sha256(SECRET.encode()).digest()
            self.grant = Grant(name="ci", role=role, runs=runs, digest=digest)
            access = Access(lambda: Tokens((self.grant,)))
        self.traffic = Traffic(TrafficLimits(**limits), lambda: 0.0, self._sleep)
        self.interceptor = GuardInterceptor(access, self.traffic)

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def handler(self, method: str, handler: Any, metadata: Any = BEARING) -> Any:
        class Details:
            invocation_metadata = metadata

        Details.method = method  # type: ignore[attr-defined]

        if handler is not None and handler.response_serializer is None:
            handler = handler._replace(response_serializer=serialized)

        async def continuation(_: object) -> Any:
            return handler

        return await self.interceptor.intercept_service(continuation, Details())  # type: ignore[arg-type]

    async def call(self, method: str, made: Any, data: bytes = b"", metadata: Any = BEARING) -> list[Any]:
        """Call a handler, and return its responses."""
        handler = await self.handler(method, made, metadata)
        context = Context(data)
        await handler.stream_stream(None, context)
        return context.heard

    async def get(self, request: Any, metadata: Any = BEARING) -> None:
        async def behavior(request: Any, context: Any) -> Any:
            self.seen.append(request)
            return run_pb2.RunServiceGetResponse()

        made: Any = grpc.unary_unary_rpc_method_handler(behavior, run_pb2.RunServiceGetRequest.FromString)
        data = request if isinstance(request, bytes) else request.SerializeToString()
        assert await self.call(GET, made, data, metadata) == [run_pb2.RunServiceGetResponse()]

    async def watch(self, runs: tuple[str, ...] = ("a-1", "b", "a-2")) -> list[str]:
        async def behavior(request: Any, context: Any) -> Any:
            for run_id in runs:
                yield run_pb2.WatchResponse(run=run_pb2.Run(run_id=run_id))

        made: Any = grpc.unary_stream_rpc_method_handler(behavior, run_pb2.WatchRequest.FromString)
        return [response.run.run_id for response in await self.call(WATCH, made)]

    async def connect(self, behavior: Any, metadata: Any = BEARING) -> None:
        handler = await self.handler(CONNECT, grpc.stream_stream_rpc_method_handler(behavior), metadata)
        await handler.stream_stream(None, Context())


async def test_caller_is_known_before_its_request_is_parsed():
    world = World()
    with pytest.raises(Refusal) as caught:
        await world.get(b"\xff" * 9, ())
    assert caught.value.reason is Reason.TOKEN_MISSING
    with pytest.raises(Refusal) as caught:
        await world.get(b"\xff" * 9)
    assert caught.value.reason is Reason.INVALID_ARGUMENT


async def test_request_for_another_run_is_not_carried_out():
    world = World()
    with pytest.raises(Refusal) as caught:
        await world.get(get("b"))
    assert caught.value.reason is Reason.RUN_NOT_ALLOWED
    assert world.seen == []
    await world.get(get("a-1"))
    assert world.seen == [get("a-1")]


async def test_watch_leaves_out_runs_that_its_caller_may_not_see():
    assert await World().watch() == ["a-1", "a-2"]


async def test_session_knows_its_admission():
    world, admissions = World(), []

    async def behavior(requests: Any, context: Any) -> None:
        admissions.append(ADMISSION.get())

    await world.connect(behavior)
    (admission,) = admissions
    assert admission == Admission(world.grant, world.traffic, "10.0.0.7")
    admission.check_run("a-1")
    with pytest.raises(Refusal):
        admission.check_run("b")
    with pytest.raises(Refusal):
        await world.connect(behavior, ())
    assert len(admissions) == 1


async def test_unary_call_knows_its_admission():
    world, admissions = World(), []

    async def behavior(request: Any, context: Any) -> Any:
        admissions.append(ADMISSION.get())

    made: Any = grpc.unary_unary_rpc_method_handler(behavior, run_pb2.RunServiceGetRequest.FromString)
    await world.call(GET, made, get("a-1").SerializeToString())
    assert admissions == [Admission(world.grant, world.traffic, "10.0.0.7")]


async def test_everyone_may_do_everything_without_a_guard():
    ADMISSION.get().check_run("anything")

    async def read() -> None: ...

    assert ADMISSION.get().paced(read) is read


async def test_peer_beyond_its_rate_waits_before_admission():
    world = World(max_messages_per_second_per_peer=1)
    for _ in range(3):
        await world.get(get("a-1"))
    assert world.slept == [1.0, 2.0]


async def test_request_without_a_token_does_not_wait_in_memory():
    world = World(max_messages_per_second_per_peer=1)
    for _ in range(100):
        with pytest.raises(Refusal):
            await world.get(get("a-1"), ())
    assert world.slept == []


async def test_request_is_read_when_its_caller_was_let_in():
    """Until then it waits at its sender, however large it is."""
    read: list[str] = []

    class Watched(Context):
        async def read(self) -> Any:
            read.append(self.what)
            return await super().read()

        what = ""

    async def slow(seconds: float) -> None:
        read.append(f"after {seconds:g} s")

    async def behavior(request: Any, context: Any) -> Any:
        return run_pb2.RunServiceGetResponse()

    world = World(max_messages_per_second_per_peer=1)
    world.traffic._sleep = slow
    made: Any = grpc.unary_unary_rpc_method_handler(behavior, run_pb2.RunServiceGetRequest.FromString)
    for what, metadata in (("let in", BEARING), ("refused", ()), ("let in", BEARING)):
        context = Watched(get("a-1").SerializeToString())
        context.what = what
        handler = await world.handler(GET, made, metadata)
        with suppress(Refusal):
            await handler.stream_stream(None, context)
    assert read == ["let in", "after 1 s", "let in"]


async def test_call_without_a_request_is_refused():
    async def behavior(request: Any, context: Any) -> None: ...

    handler = await World().handler(GET, grpc.unary_unary_rpc_method_handler(behavior))
    with pytest.raises(Refusal, match="was called without a request"):
        await handler.stream_stream(None, Context())


async def test_open_streams_of_a_peer_are_counted():
    world = World(max_sessions_per_peer=1)

    async def behavior(requests: Any, context: Any) -> None:
        with pytest.raises(Refusal, match="max_sessions_per_peer is 1"):
            await world.connect(behavior)
        with pytest.raises(Refusal, match="max_sessions_per_peer is 1"):
            await world.watch()
        # A call is no stream.
        await world.get(get("a-1"))

    await world.connect(behavior)
    assert world.seen


async def test_unknown_method_is_left_to_grpc():
    assert await World().handler("/nothing", None, ()) is None


async def test_health_needs_no_token_and_is_bounded_all_the_same():
    world = World(max_sessions_per_peer=1, max_messages_per_second_per_peer=1)

    async def check(request: Any, context: Any) -> str:
        return "serving"

    async def watch(request: Any, context: Any) -> Any:
        yield "serving"
        with pytest.raises(Refusal, match="max_sessions_per_peer is 1"):
            await world.call(f"{HEALTH}/Watch", watching, metadata=())

    checking: Any = grpc.unary_unary_rpc_method_handler(check)
    watching: Any = grpc.unary_stream_rpc_method_handler(watch)
    for _ in range(2):
        assert await world.call(f"{HEALTH}/Check", checking, metadata=()) == ["serving"]
    assert world.slept == [1.0]
    for _ in range(2):
        assert await world.call(f"{HEALTH}/Watch", watching, metadata=()) == ["serving"]


class Trickle(Context):
    """Its request never comes."""

    async def read(self) -> Any:
        await asyncio.sleep(3_600)


@in_virtual_time
async def test_small_requests_that_do_not_come_are_waited_for_by_few():
    """Nobody is kept waiting by them, and little of them is kept."""

    async def behavior(request: Any, context: Any) -> None: ...

    async def trickle(handler: Any) -> float:
        began = asyncio.get_running_loop().time()
        with pytest.raises(Refusal, match="did not come within"):
            await handler.stream_stream(None, Trickle())
        return asyncio.get_running_loop().time() - began

    world = World(Role.VIEWER, runs=("*",))
    handler = await world.handler(GET, grpc.unary_unary_rpc_method_handler(behavior))
    calls = [asyncio.create_task(trickle(handler)) for _ in range(50)]
    await asyncio.sleep(0)
    await handler.stream_stream(None, Context(b""))
    took = await asyncio.gather(*calls)
    assert took == pytest.approx([SMALL_READ_TIMEOUT] * FEW + [CROWDED_READ_TIMEOUT] * (50 - FEW))
    assert not world.interceptor._small_reads


@in_virtual_time
async def test_request_without_token_is_refused_while_others_trickle():
    async def behavior(request: Any, context: Any) -> None: ...

    world = World()
    handler: Any = await world.handler(f"{HEALTH}/Check", grpc.unary_unary_rpc_method_handler(behavior))

    async def call(context: Context) -> str:
        with pytest.raises(Refusal) as caught:
            await handler.stream_stream(None, context)
        return caught.value.message

    trickling = [asyncio.create_task(call(Trickle())) for _ in range(2 * MAX_READS)]
    await asyncio.sleep(0)
    waiting = Context(b"")
    assert "has not come whole" in await call(waiting)
    assert waiting._sent == [b""]
    elsewhere = Context(b"")
    elsewhere.peer = lambda: "ipv4:10.0.0.8:1"  # type: ignore[method-assign]
    await handler.stream_stream(None, elsewhere)
    assert elsewhere._sent == []
    for said in await asyncio.gather(*trickling):
        assert f"did not come within {OPEN_READ_TIMEOUT:g} s" in said
    gc.collect()
    assert not world.interceptor._open_reads._turns


@in_virtual_time
async def test_address_is_barred_after_a_large_request_without_a_token():
    parses: list[bytes] = []

    async def behavior(request: Any, context: Any) -> None: ...

    made: Any = grpc.unary_unary_rpc_method_handler(behavior, parses.append)
    world = World()
    with pytest.raises(Refusal, match="has 4,097 bytes"):
        await world.call(f"{HEALTH}/Check", made, bytes(OPEN_REQUEST_BYTES + 1), ())
    assert not parses
    handler = await world.handler(f"{HEALTH}/Check", made)
    next_one = Context(b"")
    with pytest.raises(Refusal, match="next ones are not read for 10 s"):
        await handler.stream_stream(None, next_one)
    assert next_one._sent == [b""]
    await asyncio.sleep(BARRED_SECONDS)
    await handler.stream_stream(None, next_one)
    assert parses == [b""]


@in_virtual_time
async def test_large_request_has_its_time_and_no_more():
    async def behavior(request: Any, context: Any) -> None: ...

    handler = await World().handler(
        "/muster.v1.StoreService/Set", grpc.unary_unary_rpc_method_handler(behavior)
    )
    with pytest.raises(Refusal, match=f"did not come within {READ_TIMEOUT:g} s"):
        await handler.stream_stream(None, Trickle())
    assert asyncio.get_running_loop().time() == START + READ_TIMEOUT


async def test_caller_without_a_token_takes_nothing_from_the_rate_of_all():
    world = World(max_messages_per_second=1)

    async def check(request: Any, context: Any) -> None: ...

    made: Any = grpc.unary_unary_rpc_method_handler(check)
    for _ in range(100):
        with pytest.raises(Refusal):
            await world.get(get("a-1"), ())
        await world.call(f"{HEALTH}/Check", made, metadata=())
    await world.get(get("a-1"))
    assert world.slept == []
    await world.get(get("a-1"))
    assert world.slept == [1.0]


async def test_each_operation_on_a_stream_is_checked_for_its_run():
    async def behavior(requests: Any, context: Any) -> Any:
        async for request in requests:
            yield request

    world = World(Role.WORKER, runs=("a-*",), max_sessions_per_peer=1)
    made: Any = grpc.stream_stream_rpc_method_handler(
        behavior, store_pb2.OperateRequest.FromString, store_pb2.OperateRequest.SerializeToString
    )
    handler = await world.handler("/muster.v1.StoreService/Operate", made)
    sent = [store_pb2.OperateRequest(check=store_pb2.CheckRequest(run_id=run)) for run in ("a-1", "b", "a-2")]
    context = Context(*(one.SerializeToString() for one in sent))
    with (
        pytest.raises(Refusal) as caught,
        world.traffic.stream("10.0.0.7"),
    ):  # A session takes no place of it.
        await handler.stream_stream(None, context)
    assert caught.value.reason is Reason.RUN_NOT_ALLOWED
    assert context.heard == [sent[0].SerializeToString()]


async def test_operation_of_a_later_version_is_refused_for_limited_tokens():
    async def behavior(requests: Any, context: Any) -> Any:
        async for request in requests:
            yield request

    made: Any = grpc.stream_stream_rpc_method_handler(
        behavior, store_pb2.OperateRequest.FromString, store_pb2.OperateRequest.SerializeToString
    )
    later = b"\xf2\x06\x02\x08\x01"  # A field of number 110, of which only a later version may know.
    for unknown in (b"", later):
        handler = await World(Role.WORKER, runs=("a-*",)).handler("/muster.v1.StoreService/Operate", made)
        context = Context(unknown)
        with pytest.raises(Refusal, match="that this version does not know") as caught:
            await handler.stream_stream(None, context)
        assert caught.value.reason is Reason.INVALID_ARGUMENT
        assert context.heard == []
    for unknown in (b"", later):
        handler = await World(Role.WORKER, runs=("*",)).handler("/muster.v1.StoreService/Operate", made)
        context = Context(unknown)
        await handler.stream_stream(None, context)
        assert context.heard == [unknown], "nothing to do is the store's to refuse"


async def test_reflection_needs_a_token_and_is_bounded():
    world = World(Role.VIEWER, max_sessions_per_peer=1, max_messages_per_second_per_peer=1)

    async def behavior(requests: Any, context: Any) -> Any:
        with pytest.raises(Refusal, match="max_sessions_per_peer is 1"):
            await handler.stream_stream(None, Context())
        async for request in requests:
            yield request

    made: Any = grpc.stream_stream_rpc_method_handler(behavior, bytes)
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    handler = await world.handler(method, made)
    context = Context(b"one", b"two")
    await handler.stream_stream(None, context)
    assert context.heard == [b"one", b"two"]
    # The call, and each of its requests (and that there are no more of them).
    assert world.slept == [1.0, 2.0, 3.0]
    handler = await world.handler(method, made, ())
    with pytest.raises(Refusal) as caught:
        await handler.stream_stream(None, Context())
    assert caught.value.reason is Reason.TOKEN_MISSING
