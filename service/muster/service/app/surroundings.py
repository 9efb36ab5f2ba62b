"""What a coordinator runs in."""

import asyncio
from dataclasses import dataclass, field

from muster.service.clock import Clock, SystemClock
from muster.service.config import Config
from muster.service.security.gate import Gate
from muster.service.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The same for a coordinator and for one that waits to become one."""

    config: Config
    gate: Gate
    metrics: Metrics
    stop: asyncio.Event
    """Set when it is to end."""
    clock: Clock = field(default_factory=SystemClock)
