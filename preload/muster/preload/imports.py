"""Imports modules into a process that is then to be forked, and says what would make its forks unusable."""

import importlib
import os
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
"""The files of NVIDIA's, AMD's and other accelerators. A driver that was initialised works in no fork."""
PROCESS = Path("/proc/self")


class PreloadError(Exception):
    """A module cannot be preloaded; the message names it, says why, and what to do."""


def preload(modules: Sequence[str], per_worker: Collection[str]) -> None:
    """Import modules.

    Args:
        modules: their names, in the order in which they are imported.
        per_worker: variables of the environment that no module may read: each worker has other values.

    Raises:
        PreloadError: a module cannot be imported, or leaves something that no fork can have.
        OSError: this process cannot be forked.
    """
    for name in modules:
        with _reads() as read:
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:
                raise PreloadError(f"{name} cannot be imported: {error!r}. Correct MUSTER_PRELOAD") from error
        found = sorted(read.intersection(per_worker))
        reason = f"reads {', '.join(found)}, which differs between workers" if found else find_obstacle()
        if reason is not None:
            raise PreloadError(f"the import of {name} {reason}. Leave it out of MUSTER_PRELOAD")


def find_obstacle() -> str | None:
    """Return what makes forks of this process unusable; None if nothing does.

    Raises:
        OSError: it cannot be forked.
    """
    _fork_once()
    threads = len(list((PROCESS / "task").iterdir()))
    if threads > 1:
        return f"leaves threads, which a fork would not have: {threads - 1}"
    for file in (PROCESS / "fd").iterdir():
        try:
            target = str(file.readlink())
        except FileNotFoundError:  # The listing's own.
            continue
        if target.startswith(DEVICES):
            return f"opens {target}, which works in no fork"
    return None


def _fork_once() -> None:
    """Fork a child that ends at once: OpenBLAS ends its threads before a fork, and restarts them at use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and newer see threads.
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)


@contextmanager
def _reads() -> Iterator[set[str]]:
    """Record which variables Python code reads from ``os.environ``."""
    read: set[str] = set()
    plain = type(os.environ)

    class Recording(plain):  # type: ignore[misc, valid-type]
        def __getitem__(self, name: str) -> str:
            read.add(name)
            value: str = super().__getitem__(name)
            return value

    os.environ.__class__ = Recording
    try:
        yield read
    finally:
        os.environ.__class__ = plain
