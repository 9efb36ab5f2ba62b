"""Metrics of a watcher, read at each scrape."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Metric, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from muster.service.version import VERSION
from muster.watcher.stats import WatcherStats
from muster.watcher.watcher import RESULTS


class WatcherMetrics(Collector):
    """Collects the metrics of a watcher.

    Args:
        stats: the watcher's counts.
    """

    def __init__(self, stats: WatcherStats) -> None:
        self._stats = stats
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def collect(self) -> list[Metric]:
        """See ``Collector``."""
        stats = self._stats
        in_force = GaugeMetricFamily(
            "muster_watcher_notices_in_force", "Notices of a source that are in force.", labels=["source"]
        )
        reported_at = GaugeMetricFamily(
            "muster_watcher_source_seen_timestamp_seconds",
            "When a source last said which notices are in force; 0: never.",
            labels=["source"],
        )
        notices = CounterMetricFamily(
            "muster_watcher_notices", "Notices of a source that came.", labels=["source"]
        )
        requests = CounterMetricFamily(
            "muster_watcher_requests",
            "Requests to the coordinator: answered, refused, or failed without an answer.",
            labels=["result"],
        )
        _fill(in_force, stats.in_force)
        _fill(reported_at, stats.reported_at)
        _fill(notices, {source: stats.notices[source] for source in stats.in_force})
        _fill(requests, {result: stats.requests[result] for result in RESULTS})
        build = InfoMetricFamily("muster_watcher_build", "Version of the watcher.", {"version": VERSION})
        return [in_force, reported_at, notices, requests, build]


def _fill(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> None:
    for label, value in values.items():
        family.add_metric([label], value)
