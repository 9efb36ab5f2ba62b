"""Reads a note by which a rank tells rank 0 what it wrote of a checkpoint.

Notes are JSON: reading a pickle could run code that another process wrote there.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def read_note(note: bytes, parse: Callable[[Any], T]) -> T:
    """Read a note of a rank of this job.

    Args:
        note: its bytes.
        parse: returns the content, given the parsed JSON.

    Raises:
        ValueError: a rank of this version writes no such note.
    """
    try:
        return parse(json.loads(note))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"a rank's note cannot be read: {error!r}. Use one version of Muster on all ranks."
        ) from error
