"""A keeper that ends is replaced, although nobody asks it for anything."""

import queue
import socket

import pytest

from lab.patience import PATIENCE
from muster.worker.errors import MusterError
from muster.worker.saves.local import keeper_watch
from muster.worker.saves.local.folder import KeeperLife
from muster.worker.saves.local.keeper_watch import KeeperWatch


class Lives:
    """Keepers, one after the other, each of which only accepts connections."""

    def __init__(self) -> None:
        self.replaced: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.fails = False
        self.begin()

    def begin(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.life = KeeperLife(1, f"http://127.0.0.1:{self.server.getsockname()[1]}", "", "")

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
    lives = Lives()
    watch = KeeperWatch(lambda: lives.life, lives.replace)
    for _ in range(2):
        lives.accept().close()
        assert lives.replaced.get(timeout=PATIENCE) == 1
    watch.close()
    assert lives.replaced.empty()
    assert not watch._thread.is_alive()
    lives.server.close()


def test_keeper_that_lives_is_left_alone():
    lives = Lives()
    watch = KeeperWatch(lambda: lives.life, lives.replace)
    connection = lives.accept()
    watch.close()
    assert lives.replaced.empty()
    connection.close()
    lives.server.close()


def test_replacement_that_fails_is_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(keeper_watch, "FIRST_PAUSE", 0.001)
    lives = Lives()
    lives.fails = True
    watch = KeeperWatch(lambda: None, lives.replace)
    for _ in range(3):
        assert lives.replaced.get(timeout=PATIENCE) == 0
    watch.close()
    assert "no keeper can be started" in caplog.text
    lives.server.close()


def test_spurious_wake_up_does_not_end_the_watch():
    """A forked child has dropped its copy."""
    lives = Lives()
    watch = KeeperWatch(lambda: lives.life, lives.replace)
    connection = lives.accept()
    watch._wake.send(b"\0")
    assert lives.replaced.get(timeout=PATIENCE) == 1, "at worst the keeper is asked whether it lives"
    lives.accept().close()
    assert lives.replaced.get(timeout=PATIENCE) == 1
    watch.close()
    connection.close()
    lives.server.close()
