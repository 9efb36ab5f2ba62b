"""How a store's operations travel: on a stream that stays open, and as calls of their own beside it.

A message on an open stream takes half the time of a call. One operation at a time goes there; what other
threads ask for meanwhile, such as a key to wait for, is a call.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias

import grpc
from google.protobuf.message import Message

from muster.client.replicas import Target
from muster.v1 import store_pb2 as pb
from muster.v1.store_pb2_grpc import StoreServiceStub
from muster.worker.channel import SharedChannel

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Waiting: TypeAlias = pb.StoreServiceGetRequest | pb.WaitRequest

_METHODS = pb.DESCRIPTOR.services_by_name["StoreService"].methods
_FIELDS = pb.OperateRequest.DESCRIPTOR.fields
CALLS = {method.input_type.full_name: method.name for method in _METHODS}
"""By request, the call that takes it."""
NAMES = {field.message_type.full_name: field.name for field in _FIELDS if field.message_type}
"""By request, its name on a stream."""
TIMEOUTS = 2
"""For so many timeouts of an operation a stream is good: gRPC bounds all of it, and no part."""
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
        self._knows_streams = True

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
        """Ask on the stream, if it is free; where one may be late, it may be so by ``TIMEOUTS`` of them.

        Args and errors are those of :meth:`call`.
        """
        if self._knows_streams and self._turn.acquire(blocking=False):
            try:
                answer = self._over_stream(request, timeout, metadata)
            finally:
                self._turn.release()
            if answer is not None:
                return answer
        return self.call(request, timeout, metadata)

    def _over_stream(self, request: Message, timeout: float | None, metadata: Metadata) -> Message | None:
        """None: there is no stream to be had."""
        used = self._stream
        if used is not None and used.is_good_for(timeout):
            try:
                if (answer := self._ask(used, request)) is not None:
                    return answer
            except grpc.RpcError as error:
                # A wait that was lost has less time left than it was sent with.
                if error.code() is not grpc.StatusCode.UNAVAILABLE or isinstance(request, Waiting):
                    raise
            # It was not used for a while, so that the coordinator has ended it, or the connection is lost.
        elif used is not None:
            used.end()
        try:
            return self._ask(_Stream(self._stub, timeout, metadata), request)
        except grpc.RpcError as error:
            if error.code() not in NO_STREAM:
                raise
            self._knows_streams = error.code() is not grpc.StatusCode.UNIMPLEMENTED
            return None

    def _ask(self, stream: "_Stream", request: Message) -> Message | None:
        """Unless it answers, nobody goes on with it: what it says later would be taken for another answer."""
        self._stream = None
        try:
            if (answer := stream.ask(request)) is not None:
                self._stream = stream
            return answer
        finally:
            if self._stream is None:
                stream.end()


class _Stream:
    """An open one.

    Args:
        stub: of the channel.
        timeout: seconds, of its operations; None: for ever.
        metadata: its headers.
    """

    def __init__(self, stub: StoreServiceStub, timeout: float | None, metadata: Metadata) -> None:
        self._timeout = timeout
        self._until = time.monotonic() + (timeout or 0.0) * TIMEOUTS
        self._said: queue.SimpleQueue[pb.OperateRequest | None] = queue.SimpleQueue()
        said: Iterator[pb.OperateRequest] = iter(self._said.get, None)
        whole = None if timeout is None else timeout * TIMEOUTS
        self._heard = stub.Operate(said, timeout=whole, metadata=metadata)
        self.end = weakref.finalize(self, _end, self._said, self._heard)
        self.end.atexit = False

    def is_good_for(self, timeout: float | None) -> bool:
        """Whether it leaves an operation its time, and no more than it must."""
        return timeout == self._timeout and (timeout is None or time.monotonic() + timeout <= self._until)

    def ask(self, request: Message) -> Message | None:
        """None: it is over, and the operation is to be asked for again."""
        name = NAMES[request.DESCRIPTOR.full_name]
        self._said.put(pb.OperateRequest(**{name: request}))  # type: ignore[arg-type]
        response = next(self._heard, None)
        if response is None:
            return None
        answer: Message = getattr(response, name)
        return answer


def _end(said: "queue.SimpleQueue[pb.OperateRequest | None]", heard: grpc.Call) -> None:
    said.put(None)
    heard.cancel()
