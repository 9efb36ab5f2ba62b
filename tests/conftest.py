"""What all tests share."""

import os
import threading
from collections.abc import Iterator

import pytest

from tests.support.patience import PATIENCE

# A test's process may import grpc before muster.worker, which then cannot do this; tests fork as well.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def pytest_addoption(parser: pytest.Parser) -> None:
    """One option, for the tests whose worth grows with their length."""
    parser.addoption(
        "--thorough",
        action="store_true",
        help="let the tests that run for longer at will do so: make thorough",
    )


@pytest.fixture
def thorough(request: pytest.FixtureRequest) -> bool:
    """Whether there is time."""
    return bool(request.config.getoption("--thorough"))


@pytest.fixture(autouse=True)
def _no_node_is_left_behind() -> Iterator[None]:
    """One that was not told to leave joins again for ever, also where a later test plays the coordinator."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("muster-node-"):
            thread.join(PATIENCE)
            assert not thread.is_alive(), f"{thread.name} goes on after its test"
