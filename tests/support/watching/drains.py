"""A coordinator that only hears of nodes that are about to be lost."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc

from muster.v1 import run_pb2
from tests.support.rich_status import rich_status


@dataclass(frozen=True)
class Heard:
    """A request, and the token that came with it."""

    request: run_pb2.DrainNodeRequest
    token: str


@dataclass
class Drains:
    """What it heard, and what it answers."""

    endpoint: str = ""
    heard: list[Heard] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    runs: list[str] = field(default_factory=list)
    """The runs on the node."""
    state: run_pb2.SaveState.ValueType = run_pb2.SAVE_STATE_ASKED
    """The state of their saves."""
    refusal: str = ""
    """The reason for which it refuses; empty: it does not."""

    def wait_for(self, wanted: Callable[[], bool], seconds: float = 20.0) -> None:
        """Wait until something is true, which may depend on what was heard."""
        with self.changed:
            assert self.changed.wait_for(wanted, seconds), self.heard

    def ids(self) -> list[str]:
        """Return the ids of the notices, in the order in which each came first."""
        return list(dict.fromkeys(one.request.notice_id for one in self.heard))

    def of(self, notice_id: str) -> list[run_pb2.DrainNodeRequest]:
        """Return the requests of a notice."""
        return [one.request for one in self.heard if one.request.notice_id == notice_id]

    def drain(
        self, request: run_pb2.DrainNodeRequest, context: grpc.ServicerContext
    ) -> run_pb2.DrainNodeResponse:
        """Answer a request."""
        metadata = dict(context.invocation_metadata())
        token = str(metadata.get("authorization", "")).removeprefix("Bearer ")
        with self.changed:
            self.heard.append(Heard(request, token))
            self.changed.notify_all()
            refusal, runs, state = self.refusal, list(self.runs), self.state
        if refusal:
            code = grpc.StatusCode.PERMISSION_DENIED
            context.abort_with_status(rich_status(refusal, "it may not do that", code))
        save = run_pb2.Save(number=1, state=state, stop=request.stop, reason=request.reason)
        return run_pb2.DrainNodeResponse(
            runs=[run_pb2.DrainedRun(run_id=run_id, save=save) for run_id in runs]
        )


@contextmanager
def listening(address: str = "127.0.0.1:0") -> Iterator[Drains]:
    """Serve until the end."""
    drains = Drains()
    with ThreadPoolExecutor(max_workers=4) as threads:
        server = grpc.server(threads)
        method = grpc.unary_unary_rpc_method_handler(
            drains.drain,
            run_pb2.DrainNodeRequest.FromString,
            run_pb2.DrainNodeResponse.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("muster.v1.RunService", {"DrainNode": method})]
        )
        port = server.add_insecure_port(address)
        drains.endpoint = f"127.0.0.1:{port}"
        server.start()
        try:
            yield drains
        finally:
            server.stop(None).wait()
