"""Metrics of a replica: whether it leads, changes of the leader, its lease, and the latency of etcd."""

import asyncio
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from muster.v1 import state_pb2

CALL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)


class Replica(Protocol):
    """The part of a replica that its metrics read."""

    @property
    def leads(self) -> bool:
        """Whether it certainly leads now."""
        ...

    @property
    def leader(self) -> state_pb2.ReplicaRecord | None:
        """The replica that leads and answers calls; None if no replica does."""
        ...

    @property
    def lease_age(self) -> float:
        """Seconds since the last renewal of its lease."""
        ...

    def addresses(self) -> list[str]:
        """Return the addresses of all live replicas."""
        ...

    @property
    def news(self) -> asyncio.Event:
        """An event that is set when any of these may have changed since the event was read."""
        ...


class EtcdCalls:
    """How long etcd takes to answer.

    Args:
        registry: the registry of the metric.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seconds = Histogram(
            "muster_etcd_call_seconds",
            "Time of an attempt to call etcd, whatever came of it.",
            ["method", "code"],
            buckets=CALL_BUCKETS,
            registry=registry,
        )

    def etcd_called(self, method: str, code: str, seconds: float) -> None:
        """Record an attempt and its status code."""
        self._seconds.labels(method.rpartition("/")[2], code).observe(seconds)


class ClusterMetrics:
    """The metrics of a replica, read at each scrape.

    Args:
        registry: the registry of the metrics.
        replica: the replica.
    """

    def __init__(self, registry: CollectorRegistry, replica: Replica) -> None:
        self._replica = replica
        gauges = (
            ("muster_leader", "1 if this replica certainly leads, else 0.", lambda: replica.leads),
            (
                "muster_replicas",
                "Replicas that are there, as this one knows.",
                lambda: len(replica.addresses()),
            ),
            (
                "muster_lease_age_seconds",
                "Time since the last renewal of this replica's lease was sent that etcd answered.",
                lambda: replica.lease_age,
            ),
        )
        for name, text, read in gauges:
            Gauge(name, text, registry=registry).set_function(read)
        self._changes = Counter(
            "muster_leader_changes",
            "How often another leader began to answer calls, since this replica was started.",
            registry=registry,
        )

    async def follow(self) -> None:
        """Count the changes of the leader, until cancelled."""
        last: bytes | None = None
        while True:
            news = self._replica.news
            leader = self._replica.leader
            now = None if leader is None else leader.SerializeToString()
            if now is not None and now != last:
                if last is not None:
                    self._changes.inc()
                last = now
            await news.wait()
