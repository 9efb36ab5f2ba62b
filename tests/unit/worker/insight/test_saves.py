"""The registry of the processes that write a save."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from lab.patience import PATIENCE
from muster.worker.insight import saves
from muster.worker.insight.process import child_state
from muster.worker.saves import AsyncRequest, ForkCaller
from muster.worker.saves.writers.callers import SpawnedWrite
from tests.support.expect import raising

# No process has such a number.
ONE, TWO = 2**30, 2**30 + 1


@pytest.fixture(autouse=True)
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes that other tests have left do not count."""
    monkeypatch.setattr(saves, "_pids", [])


def test_write_is_under_way_from_begin_to_end():
    saves.begin(TWO)
    saves.begin(ONE)
    assert saves.under_way() == [ONE, TWO]
    saves.end(TWO)
    assert saves.under_way() == [ONE]


def test_worker_with_several_writes_is_listed_once():
    saves.begin(ONE)
    saves.begin(ONE)
    assert saves.under_way() == [ONE]
    saves.end(ONE)
    assert saves.under_way() == [ONE]
    saves.end(ONE)
    assert saves.under_way() == []


def test_end_of_an_unknown_write_changes_nothing():
    saves.begin(ONE)
    saves.end(TWO)
    assert saves.under_way() == [ONE]


def test_forked_child_starts_with_no_writes():
    saves.begin(ONE)
    mine, its = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(its, str(saves.under_way()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(mine, 100) == b"[]"
    assert saves.under_way() == [ONE]
    for end in (mine, its):
        os.close(end)


def test_forked_write_is_under_way_until_it_was_waited_for():
    write = ForkCaller().start(AsyncRequest(signal.pause, (), []))
    assert saves.under_way() == [write.pid]
    assert child_state(write.pid) in ("R", "S")
    write.abort("given up")
    assert write.wait(PATIENCE).failure == "given up"
    assert saves.under_way() == []


def test_write_that_could_not_start_is_not_under_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "pidfd_open", raising(OSError, 24, "Too many open files"))
    with pytest.raises(OSError, match="Too many"):
        ForkCaller().start(AsyncRequest(signal.pause, (), []))
    assert saves.under_way() == []


def spawned_write(answer: Any) -> SpawnedWrite:
    """A request that a worker has which answers at once."""
    worker: Any = SimpleNamespace(pid=ONE, unanswered=set(), answer=answer)
    held: Any = SimpleNamespace(release=lambda: None)
    return SpawnedWrite(worker, 7, 0.0, 0.0, held)


def test_workers_write_is_under_way_until_its_answer_is_read():
    write = spawned_write(lambda *_: "no room")
    assert saves.under_way() == [ONE]
    assert write.wait(PATIENCE).failure == "no room"
    assert saves.under_way() == []


def test_workers_write_ends_if_its_answer_cannot_be_read():
    write = spawned_write(raising(ValueError, "no answer"))
    with pytest.raises(ValueError, match="no answer"):
        write.wait(PATIENCE)
    assert saves.under_way() == []
