"""What somebody may leave where a pickle is expected."""

from collections.abc import Callable
from pathlib import Path


class Mine:
    """Makes a file when it is unpickled.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self._path,)
