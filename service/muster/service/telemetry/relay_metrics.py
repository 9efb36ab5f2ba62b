"""Metrics of a relay, read at each scrape."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Metric, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from muster.relay.stats import RelayStats
from muster.service.version import VERSION

GAUGES: tuple[tuple[str, str, Callable[[RelayStats], float]], ...] = (
    ("muster_relay_workers", "Streams of workers, or of other relays, that are open.", lambda c: c.workers),
    ("muster_relay_processes", "Processes that the relay speaks for.", lambda c: c.processes),
    (
        "muster_relay_upstream_streams",
        "Streams to the coordinator that are open.",
        lambda c: c.upstream_streams,
    ),
    (
        "muster_relay_upstream_connected",
        "1 if the coordinator answered when it was asked last, else 0.",
        lambda c: c.connected,
    ),
)
COUNTERS: tuple[tuple[str, str, Callable[[RelayStats], float]], ...] = (
    ("muster_relay_arrivals", "Arrivals of ranks that were handed on.", lambda c: c.arrivals),
    ("muster_relay_messages", "Messages in which arrivals were handed on.", lambda c: c.messages),
    ("muster_relay_reconnects", "Streams to the coordinator that were lost.", lambda c: c.reconnects),
    (
        "muster_relay_cut_off",
        "How often somebody wanted the coordinator, and it was not reached in time.",
        lambda c: c.cut_offs,
    ),
    ("muster_relay_calls", "Calls that were passed on.", lambda c: c.calls),
)


class RelayMetrics(Collector):
    """Collects the metrics of a relay.

    Args:
        counts: the relay's counts.
    """

    def __init__(self, stats: RelayStats) -> None:
        self._stats = stats
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def collect(self) -> list[Metric]:
        """See ``Collector``."""
        return [
            *(GaugeMetricFamily(name, text, read(self._stats)) for name, text, read in GAUGES),
            *(CounterMetricFamily(name, text, read(self._stats)) for name, text, read in COUNTERS),
            InfoMetricFamily("muster_relay_build", "Version of the relay.", {"version": VERSION}),
        ]
