"""Reads metrics as Prometheus would."""

from prometheus_client import generate_latest

from muster.service.core.vocabulary.model import Instant, Outcome
from muster.service.telemetry.metrics import Metrics
from muster.service.telemetry.state_collector import StateCollector
from tests.support.world.core_client import CKPT
from tests.support.world.core_world import RUN, WALL, World

JOB = {"run": RUN, "prefix": CKPT}


class WorldClock:
    """The world's time, as the collector reads it."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> Instant:
        return Instant(self._world.now, WALL + self._world.now)


def watch(metrics: Metrics, world: World) -> None:
    metrics.registry.register(StateCollector(world.coordinator, metrics, WorldClock(world)))


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def exposed(metrics: Metrics) -> list[str]:
    return generate_latest(metrics.registry).decode().splitlines()


def series(metrics: Metrics, name: str) -> list[str]:
    return [line for line in exposed(metrics) if line.startswith((f"{name}{{", f"{name} "))]


def letters(count: int) -> list[str]:
    """Names without digits, which would be folded."""
    return [f"{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(count)]


def counts_of(metrics: Metrics, outcome: Outcome = Outcome.TIMED_OUT) -> list[str]:
    """The counts of decisions with one outcome: a series for each group."""
    lines = series(metrics, "muster_barrier_decisions_total")
    return [line for line in lines if f'outcome="{outcome.name}"' in line]
