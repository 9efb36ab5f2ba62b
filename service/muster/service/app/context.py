"""What a coordinator shares with a standby in the same process."""

import asyncio
from dataclasses import dataclass, field

from muster.client.span_export import SpanExport
from muster.service.clock import Clock, SystemClock
from muster.service.config import Config
from muster.service.security.context import SecurityContext
from muster.service.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class AppContext:
    """Settings, security, metrics and the stop signal of one process."""

    config: Config
    security: SecurityContext
    metrics: Metrics
    stop: asyncio.Event
    """Set when the process is to end."""
    spans: SpanExport | None = None
    """Takes the spans of what is decided; None if tracing is off."""
    clock: Clock = field(default_factory=SystemClock)
