"""What a coordinator does to its process before it serves."""

import gc
from collections.abc import Iterator
from weakref import ref

import pytest

from muster.service.app.serving import freeze_survivors, tune_garbage_collector


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


def test_collection_scans_each_object_once():
    tune_garbage_collector()
    one = Linked()
    assert is_scanned(one)
    gc.collect(0)
    assert not is_scanned(one)
    assert is_scanned(Linked())


def test_full_collection_frees_old_cycles():
    tune_garbage_collector()
    one = Linked()
    gc.collect(0)
    one.link = one
    freed = ref(one)
    del one
    gc.collect(1)
    assert freed() is not None
    gc.collect()
    assert freed() is None


def test_modules_are_not_scanned():
    tune_garbage_collector()
    assert not is_scanned(pytest)


def test_incremental_collector_goes_on_to_scan_older_objects(monkeypatch):
    monkeypatch.setattr(gc, "get_threshold", lambda: (50_000, 10, 0))
    tune_garbage_collector()
    assert freeze_survivors not in gc.callbacks
