"""Helm, started once for all tests of what is deployed."""

from collections.abc import Iterator

import pytest

from tests.support import helm as support


@pytest.fixture(scope="session")
def helm() -> Iterator[support.Helm]:
    with support.running() as process:
        yield process
