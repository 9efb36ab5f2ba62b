"""What a test expects to be given, for it and for the type checker: a failure if it is something else."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


def of_kind(kind: type[T], value: object) -> T:
    """The value, which has to be of this kind."""
    assert isinstance(value, kind), f"not a {kind.__name__}: {value!r}"
    return value


def some(value: T | None) -> T:
    """The value, which has to be there."""
    assert value is not None
    return value


def raising(error: BaseException | type[BaseException], *arguments: object) -> Callable[..., Any]:
    """A function that raises this exception, or one of this class, whatever the function is given."""

    def call(*_: object, **__: object) -> NoReturn:
        raise error if isinstance(error, BaseException) else error(*arguments)

    return call
