"""Damage to a checkpoint after its commit: what was found, and the mark that records it."""

import json
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from muster.checkpoint.retry import ABSENT, retrying

DAMAGED = ".damaged.json"
"""The file that marks a checkpoint as damaged. No job resumes from a checkpoint that has it."""
MAX_TEXT = 2_000
"""Characters of a text in a mark that are taken in, at most: ranks tell each other of it at a barrier."""
KEPT = ".kept"
"""The file that marks a checkpoint as kept: retention does not remove it."""


@dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with a checkpoint."""

    file: str
    """Its path in the checkpoint; empty for all of the checkpoint."""
    reason: str
    """What is wrong with it, for people."""
    offset: int | None = None
    """Where in the file, in bytes; None for the whole file."""
    rank: int | None = None
    """The rank that found it; None if an operator or a command did."""
    host: str = ""
    """The host that found it."""
    found_at: float = 0.0
    """When it was found, in seconds of Unix time, for people."""

    def __str__(self) -> str:
        where = self.file if self.offset is None else f"{self.file} at offset {self.offset}"
        by = "" if self.rank is None else f" (found by rank {self.rank} on {self.host})"
        return f"{where}: {self.reason}{by}" if where else f"{self.reason}{by}"

    def encode(self) -> bytes:
        """Return the content of :data:`DAMAGED`."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Damage":
        """Read the content of :data:`DAMAGED`. A mark that cannot be read still marks damage."""
        try:
            said = json.loads(data)
            known = {one.name for one in fields(cls)}
            read = cls(**{key: value for key, value in said.items() if key in known})
            read._check_types()
            return replace(
                read, file=read.file[:MAX_TEXT], reason=read.reason[:MAX_TEXT], host=read.host[:MAX_TEXT]
            )
        except (ValueError, TypeError, AttributeError, RecursionError):
            return cls(DAMAGED, "the checkpoint is marked as damaged; the mark itself cannot be read")

    def _check_types(self) -> None:
        texts = (self.file, self.reason, self.host)
        numbers = (self.offset, self.rank)
        if not (
            all(type(text) is str for text in texts)
            and all(number is None or type(number) is int for number in numbers)
            and type(self.found_at) in (float, int)
        ):
            raise TypeError(f"{self!r} has a field of a wrong type")

    @classmethod
    def found(cls, file: str, reason: str, offset: int | None = None) -> "Damage":
        """Return damage that this process has just found."""
        return cls(file, reason, offset, found_at=time.time())


def damage_in(folder: Path) -> Damage | None:
    """Return the damage that the mark in a folder records.

    Args:
        folder: the checkpoint, or the folder beside one that is a file.

    Returns:
        None if it certainly has no mark.

    Raises:
        OSError: that cannot be read.
    """
    try:
        return Damage.decode(retrying(str(folder), (folder / DAMAGED).read_bytes))
    except ABSENT:
        return None


class DamageError(Exception):
    """A part of a checkpoint is not what was committed.

    Args:
        damage: what is wrong.
    """

    def __init__(self, damage: Damage) -> None:
        super().__init__(str(damage))
        self.damage = damage

    def __reduce__(self) -> tuple[type["DamageError"], tuple[Damage]]:
        return type(self), (self.damage,)


class CorruptCheckpointError(RuntimeError):
    """A checkpoint is damaged, and there is no other one to load. All ranks raise this.

    Args:
        message: which checkpoints are damaged, how, and what to do next.
        damages: the damage of each checkpoint that was tried.
    """

    def __init__(self, message: str, damages: tuple[Damage, ...] = ()) -> None:
        super().__init__(message)
        self.damages = damages

    def __reduce__(self) -> tuple[type["CorruptCheckpointError"], tuple[str, tuple[Damage, ...]]]:
        return type(self), (str(self), self.damages)
