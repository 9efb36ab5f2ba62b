"""What can be asked of a run's store, and the answers."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class OperationId(NamedTuple):
    """Names an operation, so that repeating it does no harm."""

    client: str
    """Made at the client's start and never used again."""
    number: int
    """From 1, rising; a client sends one at a time."""


@dataclass(frozen=True, slots=True)
class Set:
    """Write keys, all or none. Answered by :class:`Done`."""

    entries: tuple[tuple[str, bytes], ...]
    id: OperationId | None = None


@dataclass(frozen=True, slots=True)
class Get:
    """Wait until all keys are there, and read them. Answered by :class:`Values`."""

    keys: tuple[str, ...]
    timeout: float
    """Seconds; 0: for as long as the call lasts."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until all keys are there. Answered by :class:`Done`."""

    keys: tuple[str, ...]
    timeout: float
    """Seconds; 0: for as long as the call lasts."""


@dataclass(frozen=True, slots=True)
class Check:
    """Are all keys there? Answered by :class:`Flag`."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Add:
    """Add to a number; a key that is not there counts as 0. Answered by :class:`Number`, the sum."""

    key: str
    amount: int
    id: OperationId | None = None


@dataclass(frozen=True, slots=True)
class CompareSet:
    """Write a key if it has the expected value; an empty one may also mean that it is not there.

    Answered by :class:`Value`: what the key then has, or the expected one if there is no key.
    """

    key: str
    expected: bytes
    desired: bytes
    id: OperationId | None = None


@dataclass(frozen=True, slots=True)
class Append:
    """Add bytes to the end of a value; a key that is not there counts as empty. Answered by :class:`Done`."""

    key: str
    value: bytes
    id: OperationId | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key. Answered by :class:`Flag`: was it there?"""

    key: str
    id: OperationId | None = None


@dataclass(frozen=True, slots=True)
class DeletePrefix:
    """Remove every key that begins so. Answered by :class:`Number`: how many there were."""

    prefix: str


@dataclass(frozen=True, slots=True)
class ListKeys:
    """Name every key. Answered by :class:`Keys`."""


@dataclass(frozen=True, slots=True)
class NumKeys:
    """Count the keys. Answered by :class:`Number`."""


Change: TypeAlias = Set | Add | CompareSet | Append | Delete
Waiting: TypeAlias = Get | Wait
Operation: TypeAlias = Change | Waiting | Check | DeletePrefix | ListKeys | NumKeys


@dataclass(frozen=True, slots=True)
class Done:
    """It is carried out."""


@dataclass(frozen=True, slots=True)
class Flag:
    """Yes or no."""

    value: bool


@dataclass(frozen=True, slots=True)
class Number:
    """A number."""

    value: int


@dataclass(frozen=True, slots=True)
class Value:
    """One key's value."""

    value: bytes


@dataclass(frozen=True, slots=True)
class Values:
    """One value for each key, in the order of the request."""

    values: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys in ascending order."""

    keys: tuple[str, ...]


Changed: TypeAlias = Done | Flag | Number | Value
"""The answers to a change."""
Answer: TypeAlias = Changed | Values | Keys
