"""Errors of a file system that cannot look at a path for a while, or for good."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from muster.checkpoint import retry

ALWAYS = 1_000_000
"""As many calls fail if the error stays."""


class StatFaults:
    """Lets ``os.stat`` and ``os.lstat`` of some paths fail, and retries wait for nothing.

    Args:
        patched: undoes it.
        paths: the paths that cannot be looked at.
        times: how many calls fail.
        error: the error's number.
        links_only: only calls that do not follow links fail.
    """

    def __init__(
        self,
        patched: pytest.MonkeyPatch,
        *paths: Path,
        times: int = ALWAYS,
        error: int = errno.EIO,
        links_only: bool = False,
    ) -> None:
        self._failing = frozenset(map(str, paths))
        self._times = times
        self._error = error
        self.struck = 0
        """How many calls have failed."""
        patched.setattr(retry, "DELAYS", (0.0,))
        stat, lstat = os.stat, os.lstat

        def failing_stat(path: Any, **options: Any) -> os.stat_result:
            if not links_only or not options.get("follow_symlinks", True):
                self._strike(path)
            return stat(path, **options)

        def failing_lstat(path: Any, **options: Any) -> os.stat_result:
            self._strike(path)
            return lstat(path, **options)

        patched.setattr(os, "stat", failing_stat)
        patched.setattr(os, "lstat", failing_lstat)

    def _strike(self, path: Any) -> None:
        if str(path) in self._failing and self.struck < self._times:
            self.struck += 1
            raise OSError(self._error, os.strerror(self._error))
