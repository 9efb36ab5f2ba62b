"""A checkpointer of one rank, and its barrier."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.worker.saves import Checkpointer
from tests.support.saves.child_processes import no_child_left
from tests.support.saves.fake_barrier import FakeBarrier


@pytest.fixture
def barrier() -> FakeBarrier:
    return FakeBarrier()


@pytest.fixture
def made(tmp_path: Path, barrier: FakeBarrier) -> Iterator[Checkpointer]:
    with no_child_left():
        one = Checkpointer(tmp_path, barrier=barrier, timeout=30)  # type: ignore[arg-type]
        yield one
        one.close()
