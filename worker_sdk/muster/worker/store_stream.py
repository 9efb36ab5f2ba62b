"""How a store's operations travel: on a stream that stays open, and as calls of their own beside it.

A message on an open stream takes half the time of a call. One operation at a time goes there; what other
threads ask for meanwhile, such as a key to wait for, is a call.
"""

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from muster.client.replicas import Target
from muster.v1 import store_pb2 as pb
from muster.v1.store_pb2_grpc import StoreServiceStub
from muster.worker.transport.channel import SharedChannel

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Waiting: TypeAlias = pb.StoreServiceGetRequest | pb.WaitRequest

_METHODS = pb.DESCRIPTOR.services_by_name["StoreService"].methods
_FIELDS = pb.OperateRequest.DESCRIPTOR.fields
CALLS = {method.input_type.full_name: method.name for method in _METHODS}
"""By request, the call that takes it."""
NAMES = {field.message_type.full_name: field.name for field in _FIELDS if field.message_type}
"""By request, its name on a stream."""
SPARE = 10.0
"""Seconds for which a stream is good beyond the timeout of an operation, or that timeout again if it is
shorter: gRPC bounds all of a stream, and no part. So an operation may take so much longer."""
SOON = 1.0
"""Seconds within which a stream that was not used for a while says that it is over."""
MOST_BYTES = 65_536
"""Of an operation on a stream. A larger one may take so long that the coordinator takes it for idle."""
CALLS_FOR = 10.0
"""Seconds for which a coordinator that holds enough streams is not asked for another."""
NO_STREAM = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""How a stream ends that the coordinator does not know, or of which it holds enough."""


class StoreLine:
    """The way of one store to one coordinator. Threads may share it.

    Args:
        target: whom to call, and how to connect.
        channel: to it.
    """

    def __init__(self, target: Target, channel: SharedChannel) -> None:
        self.target = target
        self.channel = channel
        self._stub = StoreServiceStub(channel.channel)
        self._turn = threading.Lock()
        """Held by the thread whose operation is on the stream."""
        self._stream: _Stream | None = None
        self._no_stream_until = float("-inf")

    def call(self, request: Message, timeout: float | None, metadata: Metadata) -> Message:
        """Ask by a call.

        Args:
            request: what to do.
            timeout: seconds; None: for ever.
            metadata: its headers.

        Raises:
            grpc.RpcError: it was refused, or not answered.
        """
        call: Callable[..., Message] = getattr(self._stub, CALLS[request.DESCRIPTOR.full_name])
        return call(request, timeout=timeout, metadata=metadata)

    def ask(self, request: Message, timeout: float | None, metadata: Metadata) -> Message:
        """Ask on the stream, if it is free; an answer may be later there, by ``SPARE``.

        Args and errors are those of :meth:`call`.
        """
        began = time.monotonic()
        if (
            began >= self._no_stream_until
            and request.ByteSize() <= MOST_BYTES
            and self._turn.acquire(blocking=False)
        ):
            try:
                answer = self._over_stream(request, timeout, metadata)
            finally:
                self._turn.release()
            if answer is not None:
                return answer
            if timeout is not None:
                timeout = max(timeout - (time.monotonic() - began), 0.0)
        return self.call(request, timeout, metadata)

    def _over_stream(self, request: Message, timeout: float | None, metadata: Metadata) -> Message | None:
        """None: there is no stream to be had."""
        began = time.monotonic()
        used, self._stream = self._stream, None
        if used is not None and used.is_good_for(timeout):
            try:
                if (answer := self._ask(used, request)) is not None:
                    return answer
            except grpc.RpcError as error:
                # What was lost later has less time left than it was sent with, and so has a wait.
                late = time.monotonic() - began > SOON or isinstance(request, Waiting)
                if error.code() is not grpc.StatusCode.UNAVAILABLE or late:
                    raise
            # It was not used for a while, so that the coordinator has ended it, or the connection is lost.
        elif used is not None:
            used.end()
        try:
            return self._ask(_Stream(self._stub, timeout, metadata), request)
        except grpc.RpcError as error:
            if error.code() not in NO_STREAM:
                raise
            known = error.code() is not grpc.StatusCode.UNIMPLEMENTED
            self._no_stream_until = time.monotonic() + CALLS_FOR if known else float("inf")
            return None

    def _ask(self, stream: "_Stream", request: Message) -> Message | None:
        """Unless it answers, nobody goes on with it: what it says later would be taken for another answer."""
        try:
            if (answer := stream.ask(request)) is not None:
                self._stream = stream
            return answer
        finally:
            if self._stream is None:
                stream.end()


class _Ended(grpc.RpcError):
    """How a stream has ended. Its own error is the call itself, which would live on in its traceback."""

    def __init__(self, error: grpc.RpcError) -> None:
        super().__init__()
        self._code = error.code()
        self._details = error.details()
        self._trailing_metadata = error.trailing_metadata()

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return str(self._details)

    def trailing_metadata(self) -> Any:  # noqa: ANN401
        return self._trailing_metadata


class _Stream:
    """An open one.

    Args:
        stub: of the channel.
        timeout: seconds, of its operations; None: for ever.
        metadata: its headers.
    """

    def __init__(self, stub: StoreServiceStub, timeout: float | None, metadata: Metadata) -> None:
        self._timeout = timeout
        whole = None if timeout is None else timeout + min(timeout, SPARE)
        self._until = time.monotonic() + (whole or 0.0)
        self._said: queue.SimpleQueue[pb.OperateRequest | None] = queue.SimpleQueue()
        said: Iterator[pb.OperateRequest] = iter(self._said.get, None)
        self._heard = stub.Operate(said, timeout=whole, metadata=metadata)
        # At the exit too: gRPC's destructor of an open stream needs modules that are gone by then.
        self.end = weakref.finalize(self, _end, self._said, self._heard, os.getpid())

    def is_good_for(self, timeout: float | None) -> bool:
        """Whether it is open, and leaves an operation its time, and no more than it must."""
        in_time = timeout is None or time.monotonic() + timeout <= self._until
        return timeout == self._timeout and in_time and bool(self._heard.is_active())

    def ask(self, request: Message) -> Message | None:
        """None: it is over, and the operation is to be asked for again.

        Raises:
            grpc.RpcError: it was refused, or is lost.
        """
        name = NAMES[request.DESCRIPTOR.full_name]
        self._said.put(pb.OperateRequest(**{name: request}))  # type: ignore[arg-type]
        try:
            response = next(self._heard, None)
        except grpc.RpcError as error:
            # Not chained to it, and without its traceback, in which this frame is.
            ended = _Ended(error.with_traceback(None))
        else:
            if response is None or response.WhichOneof("answer") != name:
                return None
            answer: Message = getattr(response, name)
            return answer
        try:
            raise ended
        finally:
            del ended


def _end(said: "queue.SimpleQueue[pb.OperateRequest | None]", heard: grpc.Call, owner: int) -> None:
    """End a stream, unless this is a forked child, in which gRPC must not be called."""
    if os.getpid() == owner:
        said.put(None)
        heard.cancel()
