"""Fixtures of the tests that need an etcd."""

from collections.abc import Iterator

import pytest

from lab.processes.etcd import Cluster, cluster
from muster.service.etcd.location import Location


@pytest.fixture(scope="module")
def etcd() -> Iterator[Cluster]:
    """Run one member of etcd for the tests of a module."""
    with cluster() as members:
        yield members


@pytest.fixture
def location(etcd: Cluster, request: pytest.FixtureRequest) -> Location:
    """Return a prefix of its own for each test."""
    return Location.parse(etcd.state(request.node.name))
