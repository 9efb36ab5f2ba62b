"""The transport of a store's operations: a stream that stays open, and calls beside it.

A message on an open stream takes half the time of a call. The stream carries one operation at a time. The
operations of other threads, such as a wait for a key, are calls meanwhile.
"""

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from muster.client.replicas import Target
from muster.v1 import store_pb2 as pb
from muster.v1.store_pb2_grpc import StoreServiceStub
from muster.worker.transport.call_threads import CallThreads, is_exiting
from muster.worker.transport.channel import SharedChannel

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Waiting: TypeAlias = pb.StoreServiceGetRequest | pb.WaitRequest

_METHODS = pb.DESCRIPTOR.services_by_name["StoreService"].methods
_FIELDS = pb.OperateRequest.DESCRIPTOR.fields
CALLS = {method.input_type.full_name: method.name for method in _METHODS}
"""By request: its call."""
NAMES = {field.message_type.full_name: field.name for field in _FIELDS if field.message_type}
"""By request: its field on a stream."""
SPARE = 10.0
"""Seconds that a stream lives beyond an operation's timeout, or that timeout again if it is shorter. gRPC has
a deadline for a whole stream only, so an operation may take so much longer."""
SOON = 1.0
"""Seconds within which an idle stream shows that it has ended."""
MAX_BYTES = 65_536
"""Limit for an operation on a stream. A larger one may take so long that the stream looks idle."""
CALLS_FOR = 10.0
"""Seconds until a coordinator that refused another stream is asked for one again."""
NO_STREAM = (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""How a stream ends if the coordinator does not know streams, or has too many."""


class StoreConnection:
    """One store's connection to one coordinator. Threads may share it.

    Args:
        target: the address, and how to connect.
        channel: the channel to it.
    """

    def __init__(self, target: Target, channel: SharedChannel) -> None:
        self.target = target
        self.channel = channel
        self._stub = StoreServiceStub(channel.channel)
        self._turn = threading.Lock()
        """Held by the thread that uses the stream."""
        self._stream: _Stream | None = None
        self._no_stream_until = float("-inf")

    def call(self, request: Message, timeout: float | None, metadata: Metadata) -> Message:
        """Send an operation by a call.

        Args:
            request: the operation.
            timeout: seconds; None: no limit.
            metadata: its headers.

        Raises:
            grpc.RpcError: the coordinator refused it, or did not answer.
        """
        call: Callable[..., Message] = getattr(self._stub, CALLS[request.DESCRIPTOR.full_name])
        return call(request, timeout=timeout, metadata=metadata)

    def ask(self, request: Message, timeout: float | None, metadata: Metadata) -> Message:
        """Send an operation on the stream if it is free; the answer may take ``SPARE`` longer there.

        Arguments and errors are those of :meth:`call`.
        """
        began = time.monotonic()
        if (
            began >= self._no_stream_until
            and not is_exiting()
            and request.ByteSize() <= MAX_BYTES
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
        """Return the answer; None: no stream is available."""
        began = time.monotonic()
        used, self._stream = self._stream, None
        if used is not None and used.is_good_for(timeout):
            try:
                if (answer := self._ask(used, request)) is not None:
                    return answer
            except grpc.RpcError as error:
                # A later loss leaves less time than the message says; so does any loss of a wait.
                late = time.monotonic() - began > SOON or isinstance(request, Waiting)
                if error.code() is not grpc.StatusCode.UNAVAILABLE or late:
                    raise
            # The coordinator has ended the idle stream, or the connection is lost.
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
        """Keep the stream only if it answers: a late answer would be taken for another operation's."""
        try:
            if (answer := stream.ask(request)) is not None:
                self._stream = stream
            return answer
        finally:
            if self._stream is None:
                stream.end()


class _Ended(grpc.RpcError):
    """A stream's error. The original is the call itself, which its traceback would keep alive."""

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
    """An open stream.

    Args:
        stub: the channel's.
        timeout: seconds for each operation; None: no limit.
        metadata: its headers.
    """

    def __init__(self, stub: StoreServiceStub, timeout: float | None, metadata: Metadata) -> None:
        self._timeout = timeout
        whole = None if timeout is None else timeout + min(timeout, SPARE)
        self._until = time.monotonic() + (whole or 0.0)
        self._sent: queue.SimpleQueue[pb.OperateRequest | None] = queue.SimpleQueue()
        threads: CallThreads[pb.OperateRequest] = CallThreads(iter(self._sent.get, None))
        self._received = stub.Operate(threads.requests(), timeout=whole, metadata=metadata)
        self.end = weakref.finalize(self, _end, self._sent, self._received, os.getpid())
        threads.follow(self._received, self.end)

    def is_good_for(self, timeout: float | None) -> bool:
        """Return whether it is open, and has the right time left for an operation."""
        in_time = timeout is None or time.monotonic() + timeout <= self._until
        return timeout == self._timeout and in_time and bool(self._received.is_active())

    def ask(self, request: Message) -> Message | None:
        """Return the answer; None: the stream has ended, and the operation must be sent again.

        Raises:
            grpc.RpcError: the coordinator refused it, or the stream is lost.
        """
        name = NAMES[request.DESCRIPTOR.full_name]
        self._sent.put(pb.OperateRequest(**{name: request}))  # type: ignore[arg-type]
        try:
            response = next(self._received, None)
        except grpc.RpcError as error:
            # Not chained, and without the traceback that has this frame.
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


def _end(sent: "queue.SimpleQueue[pb.OperateRequest | None]", received: grpc.Call, owner: int) -> None:
    """End a stream, unless this is a forked child, in which gRPC must not be called."""
    if os.getpid() == owner:
        sent.put(None)
        received.cancel()
