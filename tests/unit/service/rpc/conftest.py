"""A real driver, for the servicers."""

from collections.abc import AsyncIterator

import pytest

from muster.service.clock import SystemClock
from muster.service.core.vocabulary.limits import Limits
from muster.service.driver import Driver
from muster.service.rpc.codec import encode_session_message
from muster.service.storage.memory import MemoryEngine
from muster.service.telemetry.observers import Observers


@pytest.fixture
async def driver() -> AsyncIterator[Driver]:
    """Yield a driver over a state in memory."""
    driver = Driver(
        MemoryEngine(),
        clock=SystemClock(),
        observer=Observers(),
        encode=encode_session_message,
        session_ttl=10.0,
        limits=Limits(),
    )
    yield driver
    await driver.close()
