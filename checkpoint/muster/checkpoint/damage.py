"""Damage that a checkpoint took after its commit: what was found, and how it is recorded."""

import json
import time
from dataclasses import asdict, dataclass, fields, replace

DAMAGED = ".damaged.json"
"""The file in a checkpoint that says that it is damaged. A checkpoint with it is never resumed from."""
MAX_TEXT = 2_000
"""Characters of a text in a mark that are taken in, at most: ranks tell each other of it at a barrier."""
KEPT = ".kept"
"""The file in a checkpoint that an operator wants to be kept, whatever retention says."""


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
    """When, in seconds of Unix time; for people only."""

    def __str__(self) -> str:
        where = self.file if self.offset is None else f"{self.file} at offset {self.offset}"
        by = "" if self.rank is None else f" (found by rank {self.rank} on {self.host})"
        return f"{where}: {self.reason}{by}" if where else f"{self.reason}{by}"

    def encode(self) -> bytes:
        """Return the content of :data:`DAMAGED`."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Damage":
        """Read the content of :data:`DAMAGED`. Content that cannot be read marks damage nevertheless."""
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
            raise TypeError(f"no damage is {self!r}")

    @classmethod
    def found(cls, file: str, reason: str, offset: int | None = None) -> "Damage":
        """Return damage found just now by this process."""
        return cls(file, reason, offset, found_at=time.time())


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
    """A checkpoint is damaged, and there is no other one to load. All ranks raise it alike.

    Args:
        message: which checkpoints are damaged, how, and what to do next.
        damages: what was found, of each checkpoint that was tried.
    """

    def __init__(self, message: str, damages: tuple[Damage, ...] = ()) -> None:
        super().__init__(message)
        self.damages = damages

    def __reduce__(self) -> tuple[type["CorruptCheckpointError"], tuple[str, tuple[Damage, ...]]]:
        return type(self), (str(self), self.damages)
