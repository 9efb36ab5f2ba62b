"""What the checkpoint protocol needs of an object store."""

from collections.abc import Iterable
from typing import Protocol


class Objects(Protocol):
    """The objects of one job. A folder is a prefix of object names.

    Each request sees the effect of all earlier ones. Any request may raise ``OSError``, even if the store
    carried it out. ``FileNotFoundError`` says that the object does not exist.
    """

    def names(self) -> set[str]:
        """Return the names at the top level: objects, and folders, which end with ``/``."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the objects in a folder: name within the folder to size in bytes."""

    def get(self, name: str) -> bytes:
        """Return the content of an object."""

    def get_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Return the content of several objects by name, without those that do not exist."""

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object."""

    def create(self, name: str, data: bytes) -> bool:
        """Create an object unless that name exists. Return whether it was created."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove those of these objects that exist."""

    def uploads(self) -> set[str]:
        """Return the folders with multipart uploads that were not completed."""

    def abort_uploads(self, folder: str) -> None:
        """Abort the uploads of a folder, so that the store deletes their parts."""
