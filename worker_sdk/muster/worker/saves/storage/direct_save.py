"""A save that goes to the job's storage directly, as far as :class:`Checkpointer` sees it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from muster.worker.saves.storage.checkpoint_storage import PendingCheckpoint, PendingSave


class PlacedSave(PendingSave, Protocol):
    """A save whose ranks agree where it is written."""

    @property
    def is_swept(self) -> bool:
        """Whether rank 0 removes what older saves have left where it was committed."""

    def write(self, write_part: Callable[[PendingCheckpoint], None]) -> None:
        """In the child: write this rank's part.

        Args:
            write_part: writes it to a place.
        """

    def word(self) -> bytes:
        """Return what this rank says beside its vote that it has written; empty: nothing."""

    def agreed(self, words: Mapping[int, bytes]) -> PendingCheckpoint:
        """When all ranks have written: return where the save is committed, the same on all ranks.

        Args:
            words: by rank, what ranks have said beside their votes.

        Raises:
            Exception: a rank cannot bring its part there.
        """

    def failed(self, error: BaseException) -> None:
        """Note why the commit failed on this rank."""


class DirectSave:
    """A save to one place.

    Args:
        pending: the place.
    """

    is_swept = True

    def __init__(self, pending: PendingCheckpoint) -> None:
        self._pending = pending

    def begin(self) -> None:
        """See :class:`PlacedSave`, as for all methods."""
        self._pending.begin()

    def check_room(self, size: int) -> None:
        """Refuse a part that there is certainly no room for."""
        self._pending.check_room(size)

    def enter(self, rank: int) -> None:
        """Say that a rank is about to write."""
        self._pending.enter(rank)

    def leave(self, note: str, data: bytes) -> None:
        """Tell other ranks something."""
        self._pending.leave(note, data)

    def take(self, notes: Sequence[str]) -> list[bytes]:
        """Return what other ranks have left."""
        return self._pending.take(notes)

    def write(self, write_part: Callable[[PendingCheckpoint], None]) -> None:
        """In the child: write this rank's part."""
        write_part(self._pending)

    def word(self) -> bytes:
        """Say nothing."""
        return b""

    def agreed(self, words: Mapping[int, bytes]) -> PendingCheckpoint:
        """Return the place."""
        return self._pending

    def failed(self, error: BaseException) -> None:
        """Do nothing."""
