"""Sends spans by OTLP over gRPC. Only this module imports OpenTelemetry, and only when tracing is on."""

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

from muster.client.spans import Span

SCOPE = "muster"


class OtlpExporter:
    """An exporter with the settings of OpenTelemetry's environment variables.

    Args:
        service: the name of this service, unless ``OTEL_SERVICE_NAME`` has one.
        version: its version.
    """

    def __init__(self, service: str, version: str) -> None:
        named = Resource.create().attributes.get("service.name", "")
        unnamed = str(named).startswith("unknown_service")
        self._resource = Resource.create(
            {"service.version": version, **({"service.name": service} if unnamed else {})}
        )
        self._scope = InstrumentationScope(SCOPE, version)
        self._exporter = OTLPSpanExporter()
        self._shut = False

    def export(self, spans: Sequence[Span]) -> None:
        """Send the spans, within ``OTEL_EXPORTER_OTLP_TIMEOUT`` (10 s)."""
        self._exporter.export([self._readable(span) for span in spans])

    def shutdown(self) -> None:
        """Close the channel; a call that is under way ends at once. A second call changes nothing."""
        if not self._shut:
            self._shut = True
            self._exporter.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            name=span.name,
            context=_context(span.trace, span.span),
            parent=None if span.parent is None else _context(span.trace, span.parent),
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[Event(name, timestamp=_nanoseconds(at)) for name, at in span.events],
            status=Status(StatusCode.ERROR, span.failure) if span.failure else Status(),
            start_time=_nanoseconds(span.start),
            end_time=_nanoseconds(span.end),
            instrumentation_scope=self._scope,
        )


def _context(trace: int, span: int) -> SpanContext:
    return SpanContext(trace, span, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
