"""The child processes and open files of a process, before and after a test."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.saves.open_files import open_files


def state_of(pid: int) -> str | None:
    """The kernel's letter for a process; None if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[0]


def children() -> set[int]:
    """The child processes of this one, zombies among them."""
    return children_of(os.getpid())


def children_of(pid: int) -> set[int]:
    """The child processes of a process, zombies among them."""
    found: set[int] = set()
    with suppress(FileNotFoundError):  # It has ended.
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # A thread that has just ended.
                found.update(int(pid) for pid in (task / "children").read_text().split())
    return found


@contextmanager
def no_file_left() -> Iterator[None]:
    """Afterwards this process has no pipe and no handle of a process open that it had not before.

    Others may open and close what they need meanwhile, as gRPC's threads do.
    """
    kinds = ("pipe:", "anon_inode:[pidfd]")
    before = open_files(*kinds)
    yield
    assert open_files(*kinds) - before == set()


@contextmanager
def no_child_left() -> Iterator[None]:
    """Afterwards there is no child process more than before, not even a zombie."""
    before = children()
    yield
    assert children() - before == set()
