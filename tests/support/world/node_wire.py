"""The coordinator as a node sees it: the test answers each call."""

import queue
import threading
from collections.abc import Iterator

import grpc
from google.protobuf.any_pb2 import Any
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status

from lab.patience import PATIENCE
from muster.v1 import rendezvous_pb2 as pb


class Failed(grpc.RpcError):
    """A call's end, with the coordinator's reason or without."""

    def __init__(self, code: grpc.StatusCode, details: str, reason: str = "") -> None:
        self._code, self._details, self._reason = code, details, reason

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:  # type: ignore[override]
        if not self._reason:
            return ()
        info = Any()
        info.Pack(ErrorInfo(reason=self._reason, domain="muster"))
        status = Status(code=self._code.value[0], message=self._details, details=[info])
        return (("grpc-status-details-bin", status.SerializeToString()),)


def refusal(reason: str) -> Failed:
    return Failed(grpc.StatusCode.FAILED_PRECONDITION, f"refused: {reason}", reason)


BROKEN = Failed(grpc.StatusCode.UNAVAILABLE, "connection reset")


class Stream:
    """One call of Join."""

    def __init__(self, request: pb.JoinRequest) -> None:
        self.request = request
        self.cancelled = threading.Event()
        self._pushes: queue.SimpleQueue[pb.JoinResponse | grpc.RpcError] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[pb.JoinResponse]:
        while True:
            push = self._pushes.get()
            if isinstance(push, grpc.RpcError):
                raise push
            yield push

    def push(self, **message: object) -> "Stream":
        self._pushes.put(pb.JoinResponse(**message))  # type: ignore[arg-type]
        return self

    def complete(self, round: int = 0, rank: int = 0, world_size: int = 2) -> "Stream":
        return self.push(round_complete=pb.RoundComplete(round=round, rank=rank, world_size=world_size))

    def wait(self) -> "Stream":
        return self.push(standing=pb.Standing(standing=pb.NODE_STANDING_PARTICIPANT, message="waits"))

    def fail(self, error: grpc.RpcError) -> None:
        self._pushes.put(error)

    def cancel(self) -> None:
        self.cancelled.set()
        self._pushes.put(Failed(grpc.StatusCode.CANCELLED, "cancelled"))


class Wire:
    """The coordinator, as the node sees it."""

    def __init__(self) -> None:
        self._streams: queue.SimpleQueue[Stream] = queue.SimpleQueue()
        self.left: list[pb.LeaveRequest] = []
        self.answer: Exception | pb.RendezvousServiceGetResponse | pb.CloseResponse | None = None

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None: ...

    def stream(self) -> Stream:
        """The next one that the node opens."""
        return self._streams.get(timeout=PATIENCE)

    def quiet(self) -> bool:
        return self._streams.empty()

    # What the node calls.
    def Join(self, request: pb.JoinRequest, metadata: object) -> Stream:  # noqa: N802
        stream = Stream(request)
        self._streams.put(stream)
        return stream

    def Leave(self, request: pb.LeaveRequest, **_: object) -> None:  # noqa: N802
        self.left.append(request)
        self._answered()

    def Get(self, request: object, **_: object) -> object:  # noqa: N802
        return self._answered()

    def Close(self, request: object, **_: object) -> object:  # noqa: N802
        return self._answered()

    def _answered(self) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer
