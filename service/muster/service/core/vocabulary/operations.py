"""The operations of a run's store, and their answers."""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias


class OperationId(NamedTuple):
    """Identifies an operation, so that it can be repeated safely."""

    client: str
    """Chosen at the client's start, and unique."""
    number: int
    """From 1, rising; a client sends one at a time."""


@dataclass(frozen=True, slots=True)
class Set:
    """Write keys, all or none. Answered by :class:`Done`."""

    entries: tuple[tuple[str, bytes], ...]
    id: OperationId | None = None


@dataclass(frozen=True, slots=True)
class Get:
    """Wait until all keys exist, and read them. Answered by :class:`Values`."""

    keys: tuple[str, ...]
    timeout: float
    """Seconds; 0: for as long as the call lasts."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until all keys exist. Answered by :class:`Done`."""

    keys: tuple[str, ...]
    timeout: float
    """Seconds; 0: for as long as the call lasts."""


@dataclass(frozen=True, slots=True)
class Check:
    """Ask whether all keys exist. Answered by :class:`Flag`."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Add:
    """Add to a number; a missing key counts as 0. Answered by :class:`Number`, the sum."""

    key: str
    amount: int
    id: OperationId | None = None


@dataclass(frozen=True, slots=True)
class CompareSet:
    """Write a key if it has the expected value; an empty expected value matches a missing key, too.

    Answered by :class:`Value`: the value that the key then has, or the expected value for a missing key.
    """

    key: str
    expected: bytes
    desired: bytes
    id: OperationId | None = None


@dataclass(frozen=True, slots=True)
class Append:
    """Add bytes to the end of a value; a missing key counts as empty. Answered by :class:`Done`."""

    key: str
    value: bytes
    id: OperationId | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove a key. Answered by :class:`Flag`: whether it existed."""

    key: str
    id: OperationId | None = None


@dataclass(frozen=True, slots=True)
class DeletePrefix:
    """Remove every key with a prefix. Answered by :class:`Number`: how many were removed."""

    prefix: str


@dataclass(frozen=True, slots=True)
class ListKeys:
    """List all keys. Answered by :class:`Keys`."""


@dataclass(frozen=True, slots=True)
class NumKeys:
    """Count the keys. Answered by :class:`Number`."""


Change: TypeAlias = Set | Add | CompareSet | Append | Delete
Waiting: TypeAlias = Get | Wait
Operation: TypeAlias = Change | Waiting | Check | DeletePrefix | ListKeys | NumKeys


@dataclass(frozen=True, slots=True)
class Done:
    """The operation was carried out."""


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
