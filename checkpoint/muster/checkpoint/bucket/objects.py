"""What is asked of a store of objects, of which the protocol knows no more than this."""

from collections.abc import Iterable
from typing import Protocol


class Objects(Protocol):
    """The objects of one job. Folders are but the beginnings of names.

    Whoever asks sees what was done before. Any request may raise ``OSError``, and may have been carried out
    nevertheless; ``FileNotFoundError`` says that there is no such object.
    """

    def names(self) -> set[str]:
        """The objects at the top, and the folders there, whose names end with ``/``."""

    def sizes(self, folder: str) -> dict[str, int]:
        """The objects in a folder, by their names in it, and how many bytes each has."""

    def get(self, name: str) -> bytes:
        """What an object holds."""

    def get_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """What several objects hold, by their names; without those that are not there."""

    def put(self, name: str, data: bytes) -> None:
        """Make an object, or replace it."""

    def create(self, name: str, data: bytes) -> bool:
        """Make an object if there is none of that name. Returns whether there was none."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects, if they are there."""

    def uploads(self) -> set[str]:
        """The folders in which there are objects whose uploads have begun and not ended."""

    def abort_uploads(self, folder: str) -> None:
        """End those of a folder: nothing is kept of their parts."""
