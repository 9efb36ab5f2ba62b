"""A keeper that ends is replaced, although nobody asks it for anything."""

import queue
import socket

import pytest

from lab.patience import PATIENCE
from muster.worker.errors import MusterError
from muster.worker.saves.local import keeper_watch
from muster.worker.saves.local.folder import RunningKeeper
from muster.worker.saves.local.keeper_watch import KeeperWatch


class Keepers:
    """Keepers, one after the other, each of which only accepts connections."""

    def __init__(self) -> None:
        self.replaced: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.fails = False
        self.begin()

    def begin(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.running = RunningKeeper(1, f"http://127.0.0.1:{self.server.getsockname()[1]}", "", "")

    def accept(self) -> socket.socket:
        self.server.settimeout(PATIENCE)
        return self.server.accept()[0]

    def replace(self) -> None:
        if self.fails:
            self.replaced.put(0)
            raise MusterError("no keeper can be started")
        self.server.close()
        self.begin()
        self.replaced.put(1)


def test_keeper_that_ends_is_replaced_each_time():
    keepers = Keepers()
    watch = KeeperWatch(lambda: keepers.running, keepers.replace)
    for _ in range(2):
        keepers.accept().close()
        assert keepers.replaced.get(timeout=PATIENCE) == 1
    watch.close()
    assert keepers.replaced.empty()
    assert not watch._thread.is_alive()
    keepers.server.close()


def test_keeper_that_runs_is_left_alone():
    keepers = Keepers()
    watch = KeeperWatch(lambda: keepers.running, keepers.replace)
    connection = keepers.accept()
    watch.close()
    assert keepers.replaced.empty()
    connection.close()
    keepers.server.close()


def test_replacement_that_fails_is_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(keeper_watch, "FIRST_PAUSE", 0.001)
    keepers = Keepers()
    keepers.fails = True
    watch = KeeperWatch(lambda: None, keepers.replace)
    for _ in range(3):
        assert keepers.replaced.get(timeout=PATIENCE) == 0
    watch.close()
    assert "no keeper can be started" in caplog.text
    keepers.server.close()


def test_spurious_wake_up_does_not_end_the_watch():
    """A forked child has dropped its copy."""
    keepers = Keepers()
    watch = KeeperWatch(lambda: keepers.running, keepers.replace)
    connection = keepers.accept()
    watch._wake.send(b"\0")
    assert keepers.replaced.get(timeout=PATIENCE) == 1, "at worst the keeper is asked whether it runs"
    keepers.accept().close()
    assert keepers.replaced.get(timeout=PATIENCE) == 1
    watch.close()
    connection.close()
    keepers.server.close()
