"""The interceptor around every call: it turns refusals into statuses, and reports calls."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc import errors
from muster.service.security.audit import CALL

Parse = Callable[[bytes], Any]
Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class CallObserver(Protocol):
    """Is told of calls; the telemetry implements it."""

    def started(self, kind: str, method: str) -> None:
        """Take note of a new call. ``kind`` is unary, server_stream or bidi_stream."""
        ...

    def handled(self, kind: str, method: str, code: str, seconds: float) -> None:
        """Take note that a call ended with this status code."""
        ...


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Turns a raised :class:`Refusal` into its status, and reports every call to an observer.

    Args:
        observer: is told of calls.
        kinds: the kinds of methods; a method that is not listed has the kind of its handler.
    """

    def __init__(self, observer: CallObserver, kinds: Mapping[str, str] | None = None) -> None:
        self._observer = observer
        self._kinds = kinds or {}

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        # Parse requests within the call, because gRPC logs a traceback if it cannot parse one.
        parse, serializer = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary:
            unary = self._unary(handler.unary_unary, parse, method)
            return grpc.unary_unary_rpc_method_handler(unary, response_serializer=serializer)
        if handler.unary_stream:
            stream = self._stream(handler.unary_stream, parse, method)
            return grpc.unary_stream_rpc_method_handler(stream, response_serializer=serializer)
        if handler.stream_stream:
            bidi = self._bidi if parse is None else self._dialogue
            behavior = bidi(handler.stream_stream, parse, method)
            return grpc.stream_stream_rpc_method_handler(behavior, response_serializer=serializer)
        return handler

    def _unary(self, behavior: Any, parse: Parse | None, method: str) -> Any:
        async def call(data: Any, context: Any) -> Any:
            with _Timed(self._observer, "unary", method, context):
                try:
                    return await behavior(parsed(parse, data, method), context)
                except Refusal as refusal:
                    await errors.end_with(refusal, context)

        return call

    def _stream(self, behavior: Any, parse: Parse | None, method: str) -> Any:
        async def call(data: Any, context: Any) -> AsyncIterator[Any]:
            with _Timed(self._observer, "server_stream", method, context):
                try:
                    async for response in behavior(parsed(parse, data, method), context):
                        yield response
                except Refusal as refusal:
                    await errors.end_with(refusal, context)

        return call

    def _bidi(self, behavior: Any, _: Parse | None, method: str) -> Any:
        kind = self._kinds.get(method, "bidi_stream")

        async def call(requests: Any, context: Any) -> None:
            with _Timed(self._observer, kind, method, context):
                try:
                    await behavior(requests, context)
                except Refusal as refusal:
                    await errors.end_with(refusal, context)

        return call

    def _dialogue(self, behavior: Any, parse: Parse | None, method: str) -> Any:
        """Wrap a stream with an iterator of requests: the store's, and reflection's."""

        async def call(requests: Any, context: Any) -> AsyncIterator[Any]:
            with _Timed(self._observer, "bidi_stream", method, context):
                try:
                    async for response in behavior(_each_parsed(parse, requests, method), context):
                        yield response
                except Refusal as refusal:
                    await errors.end_with(refusal, context)

        return call


async def _each_parsed(parse: Parse | None, requests: Any, method: str) -> AsyncIterator[Any]:
    async for data in requests:
        yield parsed(parse, data, method)


def parsed(parse: Parse | None, data: Any, method: str) -> Any:
    """Parse a request.

    Raises:
        Refusal: INVALID_ARGUMENT.
    """
    try:
        request = parse(data) if parse else data
    except DecodeError as error:
        raise Refusal(
            Reason.INVALID_ARGUMENT,
            f"{len(data):,} bytes that are not a request of {method} ({error}). Speak the protocol of "
            "docs/protocol.md.",
        ) from None
    if (call := CALL.get()) is not None and parse is not None:
        call.ask(request)
    return request


class _Timed:
    """Reports the begin and the end of a call to the observer."""

    def __init__(self, observer: CallObserver, kind: str, method: str, context: Any) -> None:
        self._observer = observer
        self._kind = kind
        self._method = method
        self._context = context
        self._started = 0.0

    def __enter__(self) -> None:
        self._started = time.monotonic()
        self._observer.started(self._kind, self._method)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        seconds = time.monotonic() - self._started
        self._observer.handled(self._kind, self._method, _code_name(self._context, error), seconds)


def _code_name(context: Any, error: BaseException | None) -> str:
    number = context.code()
    if isinstance(number, grpc.StatusCode):
        number = number.value[0]
    if not number and error is not None:
        # If the client gave up, the call is cancelled or a write breaks. Everything else is a fault.
        given_up = not isinstance(error, Exception) or isinstance(error, grpc.aio.InternalError)
        return "Canceled" if given_up else "Unknown"
    for code in grpc.StatusCode:
        if code.value[0] == (number or 0):
            return CODE_NAMES[code]
    return "Unknown"


CODE_NAMES: dict[grpc.StatusCode, str] = {
    **{code: code.name.title().replace("_", "") for code in grpc.StatusCode},
    grpc.StatusCode.OK: "OK",
    grpc.StatusCode.CANCELLED: "Canceled",
}
"""The names that go-grpc-middleware's metrics use, such as ``DeadlineExceeded``."""
