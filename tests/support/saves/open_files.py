"""The files that this process has open."""

from contextlib import suppress
from pathlib import Path


def open_files(*kinds: str) -> set[tuple[int, str]]:
    """Return the numbers of open files, and what each stands for.

    Other threads may open and close what they need meanwhile, as gRPC's do: name the kinds that concern you.

    Args:
        kinds: the starts of what they stand for, such as ``pipe:``.
    """
    found: set[tuple[int, str]] = set()
    for entry in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):  # The list's own, or one that is just closed.
            target = str(entry.readlink())
            if target.startswith(kinds):
                found.add((int(entry.name), target))
    return found
