"""What a watcher's /metrics shows."""

from muster.service.telemetry.watcher_metrics import WatcherMetrics
from muster.service.version import VERSION
from muster.watcher.stats import WatcherStats

FAMILIES = {
    "muster_watcher_notices_in_force": "gauge",
    "muster_watcher_source_seen_timestamp_seconds": "gauge",
    "muster_watcher_notices": "counter",
    "muster_watcher_requests": "counter",
    "muster_watcher_build": "info",
}


def started() -> WatcherStats:
    return WatcherStats(in_force={"aws": 0}, reported_at={"aws": 0.0})


def test_every_series_is_there_before_any_notice():
    metrics = WatcherMetrics(started())
    assert {family.name: family.type for family in metrics.collect()} == FAMILIES
    values = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }
    assert values == {
        ("muster_watcher_notices_in_force", "aws"): 0,
        ("muster_watcher_source_seen_timestamp_seconds", "aws"): 0,
        ("muster_watcher_notices_total", "aws"): 0,
        ("muster_watcher_requests_total", "answered"): 0,
        ("muster_watcher_requests_total", "refused"): 0,
        ("muster_watcher_requests_total", "failed"): 0,
        ("muster_watcher_build_info", VERSION): 1,
    }


def test_each_metric_is_the_count_of_its_name():
    stats = started()
    stats.in_force["aws"], stats.reported_at["aws"] = 2, 1_700_000_000.5
    stats.notices["aws"] += 3
    stats.requests["refused"] += 4
    registry = WatcherMetrics(stats).registry
    assert registry.get_sample_value("muster_watcher_notices_in_force", {"source": "aws"}) == 2
    assert registry.get_sample_value("muster_watcher_notices_total", {"source": "aws"}) == 3
    assert registry.get_sample_value("muster_watcher_requests_total", {"result": "refused"}) == 4
    name = "muster_watcher_source_seen_timestamp_seconds"
    assert registry.get_sample_value(name, {"source": "aws"}) == 1_700_000_000.5
