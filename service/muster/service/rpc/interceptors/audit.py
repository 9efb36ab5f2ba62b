"""The interceptor that writes the audit log, inside the one that turns refusals into statuses."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc

from muster.service.core.vocabulary.refusal import Refusal
from muster.service.rpc.interceptors.refusals import Continuation
from muster.service.security import access
from muster.service.security.audit import CALL, OK, AuditedCall, Write, common_name


class AuditInterceptor(grpc.aio.ServerInterceptor):
    """Writes an entry for every refused call, and for every call that changes something.

    The guard records the request after parsing it, and the caller after reading its token.

    Args:
        write: takes the entries.
        kinds: the kinds of methods; a ``server_stream`` has an entry at its begin as well.
    """

    def __init__(self, write: Write, kinds: Mapping[str, str]) -> None:
        self._write = write
        self._kinds = kinds

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        codec = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(self._once(handler.unary_unary, method), *codec)
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(self._many(handler.unary_stream, method), *codec)
        # A handler without a deserializer writes its answers itself, and yields none.
        wrapped = self._once if codec[0] is None else self._many
        return grpc.stream_stream_rpc_method_handler(wrapped(handler.stream_stream, method), *codec)

    def _once(self, behavior: Any, method: str) -> Any:
        async def call(request: Any, context: Any) -> Any:
            with self._audited(method, context):
                return await behavior(request, context)

        return call

    def _many(self, behavior: Any, method: str) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            with self._audited(method, context):
                async for response in behavior(request, context):
                    yield response

        return call

    @contextmanager
    def _audited(self, method: str, context: Any) -> Iterator[None]:
        call = AuditedCall(
            self._write,
            method,
            changes=access.changes(method),
            lasts=self._kinds.get(method) == "server_stream",
            address=context.peer(),
            certificate=common_name(context.auth_context()),
        )
        CALL.set(call)
        try:
            yield
        except Refusal as refusal:
            call.refuse(refusal.reason.name, refusal.message)
            raise
        except BaseException:
            call.end(_code_name(context.code()), context.details() or "")
            raise
        call.end(OK)


def _code_name(code: Any) -> str:  # in gRPC an enumeration, a number or None
    names = {one.value[0]: one.name for one in grpc.StatusCode}
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return names[number] if number in names and number else grpc.StatusCode.CANCELLED.name
