"""What a test expects to be given, for it and for the type checker: a failure if it is something else."""

from typing import TypeVar

T = TypeVar("T")


def of_kind(kind: type[T], value: object) -> T:
    """The value, which has to be of this kind."""
    assert isinstance(value, kind), f"not a {kind.__name__}: {value!r}"
    return value


def some(value: T | None) -> T:
    """The value, which has to be there."""
    assert value is not None
    return value
