"""A replica that stands by: a real server that answers each call as docs/protocol.md has it."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from lab.patience import until
from lab.processes.coordinator import free_port
from muster.service.core.vocabulary.refusal import Reason, Refusal
from muster.service.rpc import errors

HEADER = "muster-not-leader"
HOLD = 2.0
THREADS = 64


class Standby(grpc.GenericRpcHandler):
    """Answers on a port of this machine, from this process.

    Args:
        leader: the leader that it names; empty: no leader.
        hold: seconds for which it holds a call whose sender knows as much as itself.
        credentials: for TLS.
    """

    def __init__(
        self,
        leader: str = "",
        *,
        hold: float = HOLD,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self._leader = leader
        self._hold = hold
        self._changed = threading.Condition()
        self._held = 0
        self.asked: list[tuple[str, str | None]] = []
        """The method of each call, and what its header said; None: it had none."""
        self._threads = ThreadPoolExecutor(THREADS)
        self._server = grpc.server(self._threads, handlers=[self])
        address = "127.0.0.1:0"
        if credentials is None:
            self.port = self._server.add_insecure_port(address)
        else:
            self.port = self._server.add_secure_port(address, credentials)
        self.endpoint = f"127.0.0.1:{self.port}"
        self._server.start()

    def __enter__(self) -> "Standby":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Let go of everyone."""
        with self._changed:
            self._hold = 0
            self._changed.notify_all()
        self._server.stop(None).wait()
        self._threads.shutdown()

    def follow(self, leader: str) -> None:
        """Learn who leads, and tell those who are held."""
        with self._changed:
            self._leader = leader
            self._changed.notify_all()

    def holds(self, calls: int = 1) -> None:
        """Wait until so many calls are held at once."""
        until(lambda: self._held >= calls, lambda: f"it holds {self._held} calls: {self.asked}")

    def service(self, handler_call_details: Any) -> Any:
        """See ``grpc.GenericRpcHandler``."""
        method = handler_call_details.method.rpartition("/")[2]
        metadata = dict(handler_call_details.invocation_metadata)
        return grpc.stream_stream_rpc_method_handler(
            lambda _, context: self._refuse(method, metadata.get(HEADER), context)
        )

    def _refuse(self, method: str, lost: str | None, context: grpc.ServicerContext) -> Iterator[bytes]:
        with self._changed:
            self.asked.append((method, lost))
            self._held += 1
            if lost is not None:
                self._changed.wait_for(lambda: self._leader not in ("", lost), self._hold)
            self._held -= 1
            known = {"leader": self._leader} if self._leader else {}
            who = f"{self._leader} leads" if self._leader else "nobody leads now"
        refusal = Refusal(
            Reason.NOT_LEADER,
            f"this replica stands by: {who}. Call the leader.",
            **known,
            replicas="",
        )
        yield from _ended(context, refusal)


def _ended(context: Any, refusal: Refusal) -> Iterator[bytes]:
    """End a stream before it has said anything."""
    context.abort_with_status(errors.grpc_status(refusal))
    yield b""


class Address:
    """A port of this machine that no coordinator has.

    Args:
        hung: take connections, and say nothing, as a process that was stopped; else they are refused.
    """

    def __init__(self, *, hung: bool = False) -> None:
        self._socket = socket.socket()
        # One that no connection takes by itself when it is given up.
        self._socket.bind(("127.0.0.1", free_port()))
        if hung:
            self._socket.listen(100)
        self.port = int(self._socket.getsockname()[1])
        self.endpoint = f"127.0.0.1:{self.port}"

    def __enter__(self) -> "Address":
        return self

    def __exit__(self, *_: object) -> None:
        self.give_up()

    def give_up(self) -> None:
        """Leave the port to another one."""
        self._socket.close()
