"""Imports modules into a process that is then to be forked, and says what would make its forks unusable."""

import importlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
"""The files of NVIDIA's, AMD's and other accelerators. A driver that was initialised works in no fork."""
PROCESS = Path("/proc/self")


class PreloadError(Exception):
    """A module cannot be imported ahead; the message names it, says why, and what to do."""


def preload(modules: Sequence[str]) -> None:
    """Import modules.

    Raises:
        PreloadError: one cannot be imported, or leaves this process with something that no fork can have.
    """
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            raise PreloadError(f"{name} cannot be imported: {error!r}. Correct MUSTER_PRELOAD") from error
        found = obstacle()
        if found is not None:
            raise PreloadError(f"after its import, {name} {found}. Leave it out of MUSTER_PRELOAD")


def obstacle() -> str | None:
    """Return what makes forks of this process unusable; None if nothing does."""
    _fork_once()
    threads = len(list((PROCESS / "task").iterdir()))
    if threads > 1:
        return f"runs {threads - 1} threads, which a fork would not have"
    for file in (PROCESS / "fd").iterdir():
        try:
            target = str(file.readlink())
        except FileNotFoundError:  # The listing's own.
            continue
        if target.startswith(DEVICES):
            return f"has opened {target}, which works in no fork"
    return None


def _fork_once() -> None:
    """Fork, so that libraries end the threads that they can start again: OpenBLAS does, at its next use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and newer see threads.
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
