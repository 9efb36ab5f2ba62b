"""What a coordinator does to its process before it serves."""

import gc
from collections.abc import Iterator
from unittest.mock import Mock, call
from weakref import ref

import pytest

from muster.service.app.serving import GARBAGE_THRESHOLD, collect_fully, tune_garbage_collector


class Linked:
    """Can be in a cycle."""

    link: "Linked"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """The collector runs only when a test says so, and is as before after it."""
    thresholds, callbacks = gc.get_threshold(), gc.callbacks.copy()
    gc.disable()
    yield
    gc.callbacks[:] = callbacks
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.enable()


def is_scanned(one: object) -> bool:
    """Whether the next collection scans an object."""
    return id(one) in {id(other) for other in gc.get_objects()}


def test_collections_scan_each_object_once():
    tune_garbage_collector(Mock())
    assert gc.get_threshold()[0] == GARBAGE_THRESHOLD
    one = Linked()
    assert is_scanned(one)
    gc.collect(0)
    assert not is_scanned(one)
    assert is_scanned(Linked())


def test_modules_are_not_scanned():
    tune_garbage_collector(Mock())
    assert not is_scanned(pytest)


def test_full_collection_each_hour_frees_old_cycles():
    loop = Mock()
    tune_garbage_collector(loop)
    one = Linked()
    gc.collect(0)
    one.link = one
    freed = ref(one)
    del one
    gc.collect(1)
    assert freed() is not None
    loop.call_later.assert_called_once_with(3600.0, collect_fully, loop)
    collect_fully(loop)
    assert freed() is None
    assert loop.call_later.mock_calls == 2 * [call(3600.0, collect_fully, loop)]
    assert not is_scanned(pytest)


def test_incremental_collector_scans_older_objects(monkeypatch):
    monkeypatch.setattr(gc, "get_threshold", lambda: (GARBAGE_THRESHOLD, 10, 0))
    loop = Mock()
    tune_garbage_collector(loop)
    one = Linked()
    gc.collect(0)
    assert is_scanned(one)
    assert not loop.call_later.called
