"""Metrics and a world, for each test."""

import pytest

from muster.service.telemetry.metrics import Metrics
from tests.support.world.core_world import World


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def world() -> World:
    return World(3)
