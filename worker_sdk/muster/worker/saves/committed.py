"""What a committed checkpoint is, wherever it is."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

WIDTH = 10
"""Digits of a step, so that names sort as steps do."""


class UncommittedError(ValueError):
    """What should be a checkpoint is none that was committed."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint: the marker's content, and where it is."""

    step: int
    world_size: int
    run_id: str
    prefix: str
    sequence: int
    """Of the decision that committed it."""
    path: Path | str
    """A string if it is in object storage: with its scheme."""


class Life(NamedTuple):
    """Which attempt to save a step this is. The lives of a job are in the order of these."""

    generation: int
    """The job's life between restarts."""
    number: int
    """Of the save in it: that of its barrier, which goes on where the job is started again."""


def check_types(made: Committed) -> None:
    """See that a marker has said numbers where there are numbers.

    Raises:
        ValueError: it has not.
    """
    for one in fields(Committed):
        value = getattr(made, one.name)
        if one.name != "path" and type(value) is not one.type:
            raise ValueError(f"it says {one.name} = {value!r}")
