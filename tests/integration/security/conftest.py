"""The environment of the SDK and of the command, in this process."""

import os
from collections.abc import Iterator

import pytest

import muster.worker
from muster.worker.transport import channel


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What is set here is what SDK and command find."""
    for name in [name for name in os.environ if name.startswith("MUSTER_")]:
        monkeypatch.delenv(name)
    yield monkeypatch
    muster.worker.close()
    channel._channels.clear()
