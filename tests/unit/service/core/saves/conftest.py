"""A core without ranks."""

import pytest

from tests.support.world.core_world import World


@pytest.fixture
def world() -> World:
    return World()
