"""Errors and wrong bytes of a shared file system, as the process that reads sees them."""

import errno
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from muster.checkpoint.committed import MARKER
from muster.checkpoint.manifest import MANIFEST
from tests.support.saves.damaged_job import METADATA
from tests.support.saves.disk_bucket import DiskBucket

ERRORS = (errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT)
ALWAYS = 1_000_000
"""So often a fault strikes that does not go away."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A way by which a checkpoint is read."""

    owner: Any
    function: str
    name: str
    """A pattern of the end of the path, the descriptor or the object's name that is read."""
    argument: int = 0
    """Which argument that is."""


_STEP = r"/step-0000000002[^/]*"
FOLDER = {
    "listing of the place": Reading(Path, "iterdir", "/place"),
    "listing of a checkpoint": Reading(Path, "iterdir", _STEP),
    "sizes of files": Reading(os, "scandir", _STEP),
    "marker": Reading(Path, "read_bytes", f"{_STEP}/{MARKER}"),
    "opening the manifest": Reading(os, "open", f"{_STEP}/{MANIFEST}"),
    "opening the metadata": Reading(os, "open", f"{_STEP}/{METADATA}"),
    "opening the data": Reading(os, "open", r"\.distcp"),
    "manifest": Reading(os, "preadv", f"{_STEP}/{MANIFEST}"),
    "metadata": Reading(os, "preadv", f"{_STEP}/{METADATA}"),
    "data": Reading(os, "preadv", r"\.distcp"),
}
"""All that is read of a folder that ends in ``place``, to load step 2."""
BUCKET = {
    "listing of the place": Reading(DiskBucket, "ls", "/place", 1),
    "sizes of objects": Reading(DiskBucket, "find", _STEP, 1),
    "verdict": Reading(DiskBucket, "cat_file", rf"{_STEP}\.json", 1),
    "manifest": Reading(DiskBucket, "cat_file", f"{_STEP}/{MANIFEST}", 1),
    "metadata": Reading(DiskBucket, "cat_file", f"{_STEP}/{METADATA}", 1),
    "data": Reading(DiskBucket, "cat_file", r"\.distcp", 1),
}
"""All that is read of a bucket."""


class Fault:
    """Strikes at the next calls of a kind, wherever in the process they are made.

    Args:
        reading: the kind.
        strike: called with the real function and its arguments instead.
        times: so often.
    """

    def __init__(self, reading: Reading, strike: Callable[..., Any], times: int = ALWAYS) -> None:
        self._reading = reading
        self._strike = strike
        self._times = times
        self._turn = threading.Lock()
        self.struck = 0

    def install(self, patched: pytest.MonkeyPatch) -> None:
        """Let it strike from now on."""
        real = getattr(self._reading.owner, self._reading.function)

        def call(*arguments: Any, **options: Any) -> Any:
            if self._is_due(arguments[self._reading.argument]):
                return self._strike(real, *arguments, **options)
            return real(*arguments, **options)

        patched.setattr(self._reading.owner, self._reading.function, call)

    def _is_due(self, what: Any) -> bool:
        path = str(Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else what)
        with self._turn:
            due = re.search(f"{self._reading.name}$", path) is not None and self.struck < self._times
            self.struck += due
            return due


def failing(number: int) -> Callable[..., Any]:
    """Return what fails with an error of a number."""

    def strike(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return strike


def wrong(real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Read, and flip a bit of what was read."""
    result = real(*arguments, **options)
    if isinstance(result, bytes):
        return result[:9] + bytes([result[9] ^ 1]) + result[10:]
    arguments[1][0][result // 2] ^= 1
    return result


def short(real: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Read nothing, as if the file ended there."""
    return 0 if real is os.preadv else b""
