"""A queue of saves in a job of two ranks, and its barrier."""

from collections.abc import Iterator
from contextlib import suppress

import pytest

from lab.patience import PATIENCE
from muster.worker.errors import MusterError
from muster.worker.saves import AsyncCallsQueue
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.fake_barrier import FakeBarrier


@pytest.fixture
def barrier() -> FakeBarrier:
    return FakeBarrier(world_size=2)


@pytest.fixture
def queue(barrier: FakeBarrier) -> Iterator[AsyncCallsQueue]:
    with no_child_left():
        made = AsyncCallsQueue(barrier=barrier, timeout=PATIENCE)  # type: ignore[arg-type]
        yield made
        barrier.open.set()
        with suppress(MusterError):
            made.close(abort=True)
        made.close()
