"""What an inventory says of each checkpoint that is stored in a place."""

from dataclasses import dataclass
from typing import Protocol

from muster.checkpoint.committed import Committed
from muster.checkpoint.damage import DAMAGED, KEPT, Damage
from muster.checkpoint.source import Source

MARKS = (DAMAGED, KEPT)


class NotCommittedError(ValueError):
    """A place is one checkpoint, by its name or content, that was not committed."""


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """A committed checkpoint, as it is stored."""

    name: str
    """The last part of its path."""
    step: int | None
    """None if neither its marker nor its name has one."""
    made: Committed | None
    """None if its marker cannot be read."""
    committed_at: float
    """In seconds of Unix time; 0 if it is not known."""
    size: int
    """Bytes of its files."""
    damage: Damage | None
    """Why it is not resumed from; None if nothing is known against it."""
    marks: frozenset[str]
    """The :data:`MARKS` that it has."""
    source: Source

    @property
    def kept(self) -> bool:
        """Whether retention must leave it."""
        return KEPT in self.marks

    @property
    def marked_damaged(self) -> bool:
        """Whether it is marked as damaged."""
        return DAMAGED in self.marks

    @property
    def has_digests(self) -> bool:
        """Whether its bytes can be verified."""
        return self.made is not None and self.made.manifest is not None


class Inventory(Protocol):
    """The checkpoints of one place."""

    def checkpoints(self) -> list[StoredCheckpoint]:
        """Return all committed checkpoints, damaged ones as well, newest commit first.

        Raises:
            ValueError: the place is one checkpoint that was not committed, or holds one that this version of
                Muster cannot read.
            OSError: they cannot be read. An error is never taken for absence.
        """

    def mark(self, one: StoredCheckpoint, name: str, data: bytes = b"") -> None:
        """Put a mark into a checkpoint, durably.

        Args:
            one: the checkpoint.
            name: one of :data:`MARKS`.
            data: what the mark says.

        Raises:
            OSError: it cannot be written.
        """

    def unmark(self, one: StoredCheckpoint, name: str) -> None:
        """Take a mark out of a checkpoint, durably.

        Raises:
            OSError: it cannot be removed.
        """


def content_size(sizes: dict[str, int]) -> int:
    """Return the bytes of a checkpoint's files, without its marks."""
    return sum(size for name, size in sizes.items() if name not in MARKS)
