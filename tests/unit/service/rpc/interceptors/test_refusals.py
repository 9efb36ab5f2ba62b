"""What is counted of a call, and how a refusal ends it."""

import asyncio
import gc
import weakref
from contextlib import suppress
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from muster.service.core.vocabulary.operations import Done
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.driver import Driver
from muster.service.rpc.call import Call
from muster.service.rpc.interceptors.refusals import CODE_NAMES, CallInterceptor

METHOD = "/muster.v1.RunService/Get"
REFUSAL = Refusal(Reason.RUN_NOT_FOUND, "no such run.")


class Observer:
    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def started(self, kind: str, method: str) -> None:
        self.calls.append(("started", kind, method))

    def handled(self, kind: str, method: str, code: str, seconds: float) -> None:
        assert 0 <= seconds < 60
        self.calls.append(("handled", kind, method, code))


class Aborted(Exception):
    """What gRPC raises in a handler that aborts."""


class Context:
    def __init__(self) -> None:
        self._code: Any = None
        self.details = ""

    def code(self) -> Any:
        """As gRPC has it: None, a number, or what the handler set."""
        return self._code

    def set_code(self, code: Any) -> None:
        self._code = code

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self._code, self.details = code.value[0], details
        raise Aborted

    async def abort_with_status(self, status: grpc.Status) -> None:
        self._code, self.details = status.code.value[0], status.details
        raise Aborted


class Details(grpc.HandlerCallDetails):
    method = METHOD
    invocation_metadata = ()


DETAILS = Details()


async def intercepted(handler: Any, observer: Observer) -> Any:
    async def continuation(_: object) -> Any:
        return handler

    return await CallInterceptor(observer).intercept_service(continuation, DETAILS)


async def call(behavior: Any, kind: str = "unary", context: Context | None = None) -> tuple[Any, Observer]:
    """Call a handler of this kind through the interceptor: what came of it, and what was observed."""
    observer, context = Observer(), context or Context()
    make = {
        "unary": grpc.unary_unary_rpc_method_handler,
        "server_stream": grpc.unary_stream_rpc_method_handler,
        "bidi_stream": grpc.stream_stream_rpc_method_handler,
    }[kind]
    handler = await intercepted(make(behavior), observer)
    try:
        if kind == "unary":
            result = await handler.unary_unary("request", context)
        elif kind == "server_stream":
            result = [response async for response in handler.unary_stream("request", context)]
        else:
            result = await handler.stream_stream("requests", context)
    except BaseException as error:
        result = error
    assert observer.calls[0] == ("started", kind, METHOD)
    assert len(observer.calls) == 2
    assert observer.calls[1][:3] == ("handled", kind, METHOD)
    return result, observer


async def code_of(behavior: Any, kind: str = "unary", context: Context | None = None) -> str:
    _, observer = await call(behavior, kind, context)
    return observer.calls[1][3]


def raising(error: BaseException) -> Any:
    async def behavior(request: Any, context: Any) -> None:
        raise error

    return behavior


def streaming(error: BaseException | None) -> Any:
    async def behavior(request: Any, context: Any) -> Any:
        yield 1
        yield 2
        if error is not None:
            raise error

    return behavior


async def test_call_that_ends_well_is_ok():
    async def echo(request: Any, context: Any) -> Any:
        return request

    result, observer = await call(echo)
    assert result == "request"
    assert observer.calls[1][3] == "OK"
    result, observer = await call(streaming(None), "server_stream")
    assert result == [1, 2]
    assert observer.calls[1][3] == "OK"
    assert await code_of(echo, "bidi_stream") == "OK"


async def test_refusal_becomes_its_status():
    context = Context()
    assert await code_of(raising(REFUSAL), context=context) == "NotFound"
    assert context.details == "no such run."
    assert await code_of(streaming(REFUSAL), "server_stream") == "NotFound"


class LargeRequest(bytearray):
    """Bytes that can be watched by a weak reference."""


async def test_refused_call_frees_its_request_without_a_garbage_collection(driver: Driver):
    async def refused_by_core(request: Any, context: Any) -> None:
        with Call(driver, Done) as call:
            call.refuse(Refusal(Reason.RUN_NOT_FOUND, "no such run."))
            await call.answer()

    handler = await intercepted(grpc.unary_unary_rpc_method_handler(refused_by_core), Observer())
    request = LargeRequest(1_000_000)
    kept = weakref.ref(request)
    gc.disable()
    try:
        with suppress(Aborted):
            await handler.unary_unary(request, Context())
        del request
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["unary", "bidi_stream"])
async def test_call_that_its_client_gave_up_is_canceled(kind: str):
    assert await code_of(raising(asyncio.CancelledError()), kind) == "Canceled"
    assert await code_of(raising(grpc.aio.InternalError("the stream broke")), kind) == "Canceled"


async def test_stream_that_nobody_reads_on_is_canceled():
    observer = Observer()
    handler = await intercepted(grpc.unary_stream_rpc_method_handler(streaming(None)), observer)
    responses = handler.unary_stream("request", Context())
    assert await anext(responses) == 1
    await responses.aclose()
    assert observer.calls[1] == ("handled", "server_stream", METHOD, "Canceled")


@pytest.mark.parametrize("kind", ["unary", "bidi_stream"])
async def test_fault_of_ours_is_not_counted_as_the_clients_doing(kind: str):
    result, observer = await call(raising(KeyError("bug")), kind)
    assert isinstance(result, KeyError)
    assert observer.calls[1][3] == "Unknown"


@pytest.mark.parametrize("code", grpc.StatusCode)
async def test_code_that_a_handler_set_is_counted(code: grpc.StatusCode):
    async def behavior(request: Any, context: Context) -> None:
        context.set_code(code)

    assert await code_of(behavior) == CODE_NAMES[code]

    async def by_number(request: Any, context: Context) -> None:
        context.set_code(code.value[0])

    assert await code_of(by_number) == CODE_NAMES[code]


async def test_number_that_is_no_code_is_unknown():
    async def behavior(request: Any, context: Context) -> None:
        context.set_code(99)

    assert await code_of(behavior) == "Unknown"


async def test_method_that_does_not_exist_is_left_to_grpc():
    observer = Observer()
    assert await intercepted(None, observer) is None
    assert observer.calls == []


async def echo(request: Any, context: Any) -> Any:
    return request


async def echo_once(request: Any, context: Any) -> Any:
    yield request


async def test_messages_are_coded_as_before():
    make: Any = grpc.unary_unary_rpc_method_handler
    handler = await intercepted(make(echo, Duration.FromString, Duration.SerializeToString), Observer())
    assert handler.request_deserializer is None
    assert handler.response_serializer is Duration.SerializeToString
    assert await handler.unary_unary(Duration(seconds=7).SerializeToString(), Context()) == Duration(
        seconds=7
    )


async def test_request_that_cannot_be_parsed_is_a_refusal_and_no_fault():
    """Left to gRPC it would be a traceback in the log."""
    calls: list[tuple[Any, str]] = [
        (grpc.unary_unary_rpc_method_handler(echo, Duration.FromString), "unary_unary"),
        (grpc.unary_stream_rpc_method_handler(echo_once, Duration.FromString), "unary_stream"),
    ]
    for make, kind in calls:
        observer, context = Observer(), Context()
        answer = getattr(await intercepted(make, observer), kind)(b"\xff" * 9, context)
        with pytest.raises(Aborted):
            await (answer if kind == "unary_unary" else anext(answer))
        assert context.details.startswith(f"9 bytes that are not a request of {METHOD}")
        assert observer.calls[-1][-1] == "InvalidArgument"


async def echo_each(requests: Any, context: Any) -> Any:
    async for request in requests:
        yield request


async def test_requests_on_a_stream_are_parsed_one_by_one():
    async def say(*said: bytes) -> Any:
        for data in said:
            yield data

    make: Any = grpc.stream_stream_rpc_method_handler(echo_each, Duration.FromString)
    observer, context = Observer(), Context()
    handler = await intercepted(make, observer)
    assert handler.request_deserializer is None
    answers = handler.stream_stream(say(Duration(seconds=7).SerializeToString(), b"\xff" * 9), context)
    assert await anext(answers) == Duration(seconds=7)
    with pytest.raises(Aborted):
        await anext(answers)
    assert context.details.startswith(f"9 bytes that are not a request of {METHOD}")
    assert observer.calls[-1] == ("handled", "bidi_stream", METHOD, "InvalidArgument")


def test_code_names_are_those_of_go_grpc_middleware():
    assert set(CODE_NAMES) == set(grpc.StatusCode)
    assert sorted(CODE_NAMES.values()) == [
        "Aborted",
        "AlreadyExists",
        "Canceled",
        "DataLoss",
        "DeadlineExceeded",
        "FailedPrecondition",
        "Internal",
        "InvalidArgument",
        "NotFound",
        "OK",
        "OutOfRange",
        "PermissionDenied",
        "ResourceExhausted",
        "Unauthenticated",
        "Unavailable",
        "Unimplemented",
        "Unknown",
    ]


async def test_call_that_only_grpc_sees_as_a_stream_is_counted_by_its_kind():
    """The guard makes a stream of every call."""
    observer = Observer()

    async def continuation(_: object) -> Any:
        async def behavior(requests: Any, context: Any) -> None: ...

        return grpc.stream_stream_rpc_method_handler(behavior)

    interceptor = CallInterceptor(observer, {METHOD: "unary"})
    handler = await interceptor.intercept_service(continuation, DETAILS)
    await handler.stream_stream(None, Context())
    assert observer.calls == [("started", "unary", METHOD), ("handled", "unary", METHOD, "OK")]
