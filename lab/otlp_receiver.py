"""A receiver of traces: a gRPC server with OpenTelemetry's public service."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from lab.patience import PATIENCE, until

LONGEST_CALL = {"OTEL_EXPORTER_OTLP_TIMEOUT": str(10 * PATIENCE)}
"""With these variables OpenTelemetry itself waits longer for a receiver than any test."""


class Receiver(service.TraceServiceServicer):
    """Keeps the spans that it gets.

    Args:
        blocks: whether no call is ever answered.
    """

    def __init__(self, *, blocks: bool = False) -> None:
        self.endpoint = ""
        self.called = threading.Event()
        self.ended = threading.Event()
        self._blocks = blocks
        self._spans: list[tuple[str, Span]] = []

    def Export(  # noqa: N802
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        """Take spans."""
        self.called.set()
        if self._blocks:
            self.ended.wait()
        for resource in request.resource_spans:
            names = [
                one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
            ]
            self._spans += [(names[0], span) for scope in resource.scope_spans for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def spans(self) -> list[tuple[str, Span]]:
        """Return each span that came so far, and the service that made it."""
        return list(self._spans)

    def await_spans(self, enough: Callable[[list[tuple[str, Span]]], bool]) -> list[tuple[str, Span]]:
        """Wait until the spans are enough, and return them."""
        until(lambda: enough(self.spans()))
        return self.spans()


def attributes(span: Span) -> dict[str, object]:
    """Return the attributes of a span."""
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}


@contextmanager
def receiver(*, blocks: bool = False) -> Iterator[Receiver]:
    """Serve a receiver on loopback."""
    running = Receiver(blocks=blocks)
    server = grpc.server(futures.ThreadPoolExecutor(4))
    service.add_TraceServiceServicer_to_server(running, server)  # type: ignore[no-untyped-call]
    running.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield running
    finally:
        running.ended.set()
        server.stop(0).wait()
