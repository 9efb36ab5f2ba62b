"""Counting what is open, by its owner."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

K = TypeVar("K")


@contextmanager
def counted(counter: Counter[K], key: K, amount: int = 1) -> Iterator[None]:
    """Count something for as long as the block runs.

    Args:
        counter: what is open. A key whose count reaches 0 is removed.
        key: the owner.
        amount: how much of it.
    """
    counter[key] += amount
    try:
        yield
    finally:
        counter[key] -= amount
        if not counter[key]:
            del counter[key]
