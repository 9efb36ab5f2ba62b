"""What a relay's /metrics shows."""

import pytest
from prometheus_client import generate_latest

from muster.relay.stats import RelayStats
from muster.service.telemetry.relay_metrics import RelayMetrics
from muster.service.version import VERSION

FAMILIES = {
    "muster_relay_workers": "gauge",
    "muster_relay_processes": "gauge",
    "muster_relay_upstream_streams": "gauge",
    "muster_relay_upstream_connected": "gauge",
    "muster_relay_arrivals": "counter",
    "muster_relay_messages": "counter",
    "muster_relay_reconnects": "counter",
    "muster_relay_cut_off": "counter",
    "muster_relay_calls": "counter",
    "muster_relay_build": "info",
}


@pytest.fixture
def stats() -> RelayStats:
    return RelayStats()


@pytest.fixture
def metrics(stats: RelayStats) -> RelayMetrics:
    return RelayMetrics(stats)


def value(metrics: RelayMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(name)


def test_every_family_is_there_before_anybody_comes(metrics: RelayMetrics):
    found = {family.name: family.type for family in metrics.collect()}
    assert found == FAMILIES
    ours = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    assert set(ours.values()) == {0, 1}
    assert [name for name, count in ours.items() if count] == ["muster_relay_build_info"]


def test_each_metric_is_the_count_of_its_name(stats: RelayStats, metrics: RelayMetrics):
    stats.workers, stats.processes, stats.upstream_streams = 8, 9, 2
    stats.reconnects, stats.calls = 3, 40
    stats.folded(8)
    stats.folded(1)
    assert {name: value(metrics, f"muster_relay_{name}") for name in ("workers", "processes")} == {
        "workers": 8,
        "processes": 9,
    }
    assert value(metrics, "muster_relay_upstream_streams") == 2
    counters = {
        name: value(metrics, f"muster_relay_{name}_total")
        for name in ("arrivals", "messages", "reconnects", "cut_off", "calls")
    }
    assert counters == {"arrivals": 9, "messages": 2, "reconnects": 3, "cut_off": 0, "calls": 40}


def test_a_relay_is_connected_until_it_does_not_reach_the_coordinator_for_someone(
    stats: RelayStats, metrics: RelayMetrics
):
    stats.connected = True
    assert value(metrics, "muster_relay_upstream_connected") == 1
    stats.cut_off()
    assert value(metrics, "muster_relay_upstream_connected") == 0
    assert value(metrics, "muster_relay_cut_off_total") == 1


def test_version_and_process_are_shown(metrics: RelayMetrics):
    assert metrics.registry.get_sample_value("muster_relay_build_info", {"version": VERSION}) == 1
    text = generate_latest(metrics.registry).decode()
    assert "\nprocess_resident_memory_bytes " in text
    assert "\npython_info{" in text
    # The coordinator's alone: alerts know it by that.
    assert "\nmuster_build_info" not in text
