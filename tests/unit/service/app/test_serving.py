"""What a coordinator does to its process before it serves."""

import gc
from collections.abc import Iterator
from weakref import ref

import pytest

from muster.service.app.serving import freeze_survivors, tune_garbage_collector


class Linked:
    """Can be in a cycle."""

    link: "Linked"


@pytest.fixture
def tuned() -> Iterator[None]:
    """A tuned garbage collector, which runs only when a test says so."""
    thresholds = gc.get_threshold()
    gc.disable()
    tune_garbage_collector()
    yield
    gc.callbacks.remove(freeze_survivors)
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    gc.enable()


def is_scanned(one: object) -> bool:
    """Whether the next collection scans an object."""
    return id(one) in {id(other) for other in gc.get_objects()}


@pytest.mark.usefixtures("tuned")
def test_collection_scans_each_object_once():
    one = Linked()
    assert is_scanned(one)
    gc.collect(0)
    assert not is_scanned(one)
    assert is_scanned(Linked())


@pytest.mark.usefixtures("tuned")
def test_full_collection_frees_old_cycles():
    one = Linked()
    gc.collect(0)
    one.link = one
    freed = ref(one)
    del one
    gc.collect(1)
    assert freed() is not None
    gc.collect()
    assert freed() is None


@pytest.mark.usefixtures("tuned")
def test_modules_are_not_scanned():
    assert not is_scanned(pytest)
