"""Levels of durability: what a checkpoint survives."""

import enum
from typing import Literal, TypeAlias, get_args

WaitFor: TypeAlias = Literal["local", "replicated", "persisted"]
"""The level that a save waits for before it counts as finalized."""


class Level(enum.IntEnum):
    """What a checkpoint survives. Each level includes those below it, and compares greater."""

    LOCAL = 1
    """Every rank has written its part on its own node. It survives every process, and no lost node."""
    REPLICATED = 2
    """Each part is on ``replicas`` further nodes. It survives the loss of so many nodes at once."""
    PERSISTED = 3
    """It is committed in shared storage. It survives the loss of all nodes."""

    @classmethod
    def of(cls, name: str) -> "Level":
        """Return a level by its name in lower case.

        Raises:
            ValueError: there is no such level.
        """
        if name not in get_args(WaitFor):
            known = ", ".join(f'"{one}"' for one in get_args(WaitFor))
            raise ValueError(f"wait_for = {name!r}: it must be one of {known}.")
        return cls[name.upper()]

    def __str__(self) -> str:
        return self.name.lower()
