"""A call is let in before it is parsed, and about the run that it names before it is carried out."""

import hashlib
from typing import Any

import grpc
import pytest

from muster.service.core.refusal import Reason, Refusal
from muster.service.rpc.guard import ADMISSION, MOST_OPEN_BYTES, MOST_WAIT, Admission, GuardInterceptor
from muster.service.security.access import Access
from muster.service.security.config import TrafficLimits
from muster.service.security.tokens import Grant, Role, Tokens
from muster.service.security.traffic import Traffic
from muster.v1 import run_pb2

SECRET = "s3cr3t-0123456789-abcdef"
BEARING = (("authorization", f"Bearer {SECRET}"),)
GET = "/muster.v1.RunService/Get"
WATCH = "/muster.v1.RunService/Watch"
CONNECT = "/muster.v1.SessionService/Connect"


def get(run_id: str) -> run_pb2.RunServiceGetRequest:
    return run_pb2.RunServiceGetRequest(run_id=run_id)


class Context:
    def __init__(self) -> None:
        self.status: grpc.Status | None = None

    def peer(self) -> str:
        return "ipv4:10.0.0.7:1"

    async def abort_with_status(self, status: grpc.Status) -> None:
        self.status = status
        raise RuntimeError("aborted")


class World:
    """One interceptor, and what came through it."""

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

        async def continuation(_: object) -> Any:
            return handler

        return await self.interceptor.intercept_service(continuation, Details())  # type: ignore[arg-type]

    async def get(self, request: Any, metadata: Any = BEARING) -> Any:
        async def behavior(request: Any, context: Any) -> Any:
            self.seen.append(request)
            return run_pb2.RunServiceGetResponse()

        made = grpc.unary_unary_rpc_method_handler(behavior, run_pb2.RunServiceGetRequest.FromString)
        handler = await self.handler(GET, made, metadata)
        data = request if isinstance(request, bytes) else request.SerializeToString()
        return await handler.unary_unary(data, Context())

    async def watch(self) -> Any:
        async def behavior(request: Any, context: Any) -> Any:
            for run_id in ("a-1", "b", "a-2"):
                yield run_pb2.WatchResponse(run=run_pb2.Run(run_id=run_id))

        made = grpc.unary_stream_rpc_method_handler(behavior, run_pb2.WatchRequest.FromString)
        handler = await self.handler(WATCH, made)
        return handler.unary_stream(b"", Context())

    async def connect(self, behavior: Any, metadata: Any = BEARING) -> None:
        handler = await self.handler(CONNECT, grpc.stream_stream_rpc_method_handler(behavior), metadata)
        await handler.stream_stream(None, Context())


async def test_a_caller_is_known_before_its_request_is_parsed():
    world = World()
    with pytest.raises(Refusal) as caught:
        await world.get(b"\xff" * 9, ())
    assert caught.value.reason is Reason.TOKEN_MISSING
    with pytest.raises(Refusal) as caught:
        await world.get(b"\xff" * 9)
    assert caught.value.reason is Reason.INVALID_ARGUMENT


async def test_a_request_for_another_run_is_not_carried_out():
    world = World()
    with pytest.raises(Refusal) as caught:
        await world.get(get("b"))
    assert caught.value.reason is Reason.RUN_NOT_ALLOWED
    assert world.seen == []
    await world.get(get("a-1"))
    assert world.seen == [get("a-1")]


async def test_a_watch_leaves_out_what_is_not_for_its_caller():
    assert [one.run.run_id async for one in await World().watch()] == ["a-1", "a-2"]


async def test_a_session_finds_out_as_whom_it_was_admitted():
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


async def test_a_unary_call_finds_out_as_whom_it_was_admitted():
    world, admissions = World(), []

    async def behavior(request: Any, context: Any) -> Any:
        admissions.append(ADMISSION.get())

    made = grpc.unary_unary_rpc_method_handler(behavior, run_pb2.RunServiceGetRequest.FromString)
    handler = await world.handler(GET, made)
    await handler.unary_unary(get("a-1").SerializeToString(), Context())
    assert admissions == [Admission(world.grant, world.traffic, "10.0.0.7")]


async def test_without_a_guard_everyone_may_do_everything():
    ADMISSION.get().check_run("anything")

    async def read() -> None: ...

    assert ADMISSION.get().paced(read) is read


async def test_a_peer_beyond_its_rate_waits_before_it_is_let_in():
    world = World(max_messages_per_second_per_peer=1)
    for _ in range(3):
        await world.get(get("a-1"))
    assert world.slept == [1.0, 2.0]


async def test_who_has_no_token_does_not_wait_with_its_request_in_memory():
    world = World(max_messages_per_second_per_peer=1)
    for _ in range(100):
        with pytest.raises(Refusal):
            await world.get(get("a-1"), ())
    assert world.slept == []


@pytest.mark.parametrize("request_", [get("a-1"), run_pb2.RunServiceGetRequest()], ids=["full", "empty"])
async def test_a_request_does_not_wait_in_memory_for_long(request_: run_pb2.RunServiceGetRequest):
    world = World(runs=("*",), max_messages_per_second_per_peer=1)
    for _ in range(1 + round(MOST_WAIT)):
        await world.get(request_)
    for _ in range(100):
        with pytest.raises(Refusal, match="turn in 11 s; the limit max_messages_per_second_per_peer is 1"):
            await world.get(request_)
    assert max(world.slept) == MOST_WAIT


async def test_a_stream_waits_for_as_long_as_it_takes():
    world = World(max_messages_per_second_per_peer=1)

    async def behavior(requests: Any, context: Any) -> None: ...

    for _ in range(100):
        await world.connect(behavior)
    assert max(world.slept) == 99


async def test_a_large_request_without_a_token_is_refused():
    async def check(request: Any, context: Any) -> None: ...

    handler = await World().handler(
        "/grpc.health.v1.Health/Check", grpc.unary_unary_rpc_method_handler(check), ()
    )
    await handler.unary_unary(bytes(MOST_OPEN_BYTES), Context())
    with pytest.raises(Refusal, match=r"a request of 4,097 bytes: .*/Check takes 4,096"):
        await handler.unary_unary(bytes(MOST_OPEN_BYTES + 1), Context())


async def test_open_streams_of_a_peer_are_counted():
    world = World(max_sessions_per_peer=1)

    async def behavior(requests: Any, context: Any) -> None:
        with pytest.raises(Refusal, match="max_sessions_per_peer is 1"):
            await world.connect(behavior)
        with pytest.raises(Refusal, match="max_sessions_per_peer is 1"):
            await anext(await world.watch())
        # A call is no stream.
        await world.get(get("a-1"))

    await world.connect(behavior)
    assert world.seen


async def test_what_is_not_there_is_left_to_grpc():
    assert await World().handler("/nothing", None, ()) is None


async def test_health_needs_no_token_and_is_bounded_all_the_same():
    world = World(max_sessions_per_peer=1, max_messages_per_second_per_peer=1)

    async def check(request: Any, context: Any) -> str:
        return "serving"

    async def watch(request: Any, context: Any) -> Any:
        yield "serving"

    made = grpc.unary_unary_rpc_method_handler(check)
    handler = await world.handler("/grpc.health.v1.Health/Check", made, ())
    assert [await handler.unary_unary(b"", Context()) for _ in range(2)] == ["serving"] * 2
    assert world.slept == [1.0]
    made = grpc.unary_stream_rpc_method_handler(watch)
    handler = await world.handler("/grpc.health.v1.Health/Watch", made, ())
    opened = handler.unary_stream(b"", Context())
    assert await anext(opened) == "serving"
    with pytest.raises(Refusal, match="max_sessions_per_peer is 1"):
        await anext(handler.unary_stream(b"", Context()))
    await opened.aclose()
    assert await anext(handler.unary_stream(b"", Context())) == "serving"


async def test_who_has_no_token_takes_nothing_from_the_rate_of_all():
    world = World(max_messages_per_second=1)

    async def check(request: Any, context: Any) -> None: ...

    made = grpc.unary_unary_rpc_method_handler(check)
    health = await world.handler("/grpc.health.v1.Health/Check", made, ())
    for _ in range(100):
        with pytest.raises(Refusal):
            await world.get(get("a-1"), ())
        await health.unary_unary(b"", Context())
    await world.get(get("a-1"))
    assert world.slept == []
    await world.get(get("a-1"))
    assert world.slept == [1.0]


async def test_reflection_needs_a_token_and_is_bounded():
    world = World(Role.VIEWER, max_sessions_per_peer=1, max_messages_per_second_per_peer=1)

    async def asked() -> Any:
        for request in ("one", "two"):
            yield request

    async def behavior(requests: Any, context: Any) -> Any:
        with pytest.raises(Refusal, match="max_sessions_per_peer is 1"):
            await anext(handler.stream_stream(asked(), Context()))
        async for request in requests:
            yield request

    made = grpc.stream_stream_rpc_method_handler(behavior, bytes)
    method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    handler = await world.handler(method, made)
    assert [one async for one in handler.stream_stream(asked(), Context())] == ["one", "two"]
    # The call, and each of its requests.
    assert world.slept == [1.0, 2.0]
    handler = await world.handler(method, made, ())
    with pytest.raises(Refusal) as caught:
        await anext(handler.stream_stream(asked(), Context()))
    assert caught.value.reason is Reason.TOKEN_MISSING
