"""Warnings that saves and loads cause by design are ignored, and filters of others are left alone."""

import os
import warnings

import pytest

from muster.worker.saves.warning_filters import ignore_warning
from muster.worker.saves.writers import forking


def test_warning_is_ignored_by_its_start_class_and_module():
    ignore_warning("known to", UserWarning, "saves")
    warnings.warn_explicit("known to happen", UserWarning, "saves.py", 1, module="saves")
    others = [
        ("unknown", UserWarning, "saves"),
        ("known to", FutureWarning, "saves"),
        ("known to", UserWarning, "own"),
    ]
    for text, category, module in others:
        with pytest.raises(category, match=text):
            warnings.warn_explicit(text, category, f"{module}.py", 1, module=module)


def test_filter_is_added_once():
    ignore_warning("known to", UserWarning)
    before = list(warnings.filters)
    ignore_warning("known to", UserWarning)
    assert warnings.filters == before


def test_fork_ignores_its_own_warning_and_keeps_what_others_set_meanwhile(monkeypatch: pytest.MonkeyPatch):
    text = "This process (pid=42) is multi-threaded, use of fork() may lead to deadlocks in the child."

    def fork_beside_threads() -> int:
        warnings.warn_explicit(text, DeprecationWarning, "forking.py", 1, module=forking.__name__)
        # As another thread may do at this instant.
        warnings.filterwarnings("ignore", "set by another thread")
        raise OSError("no room for another process")

    monkeypatch.setattr(os, "fork", fork_beside_threads)
    with pytest.raises(OSError, match="no room"):
        forking.fork(lambda: None)
    warnings.warn("set by another thread", UserWarning, stacklevel=1)
    with pytest.raises(DeprecationWarning, match="multi-threaded"):
        warnings.warn_explicit(text, DeprecationWarning, "user.py", 1, module="user")
