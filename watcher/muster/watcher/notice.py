"""A notice that a node is about to be lost."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notice that a node is, or may be, about to be lost."""

    id: str
    """The same for the same notice, also after a restart of the watcher: ``SOURCE/KIND/DETAIL``, printable."""
    reason: str
    """The cause, for people."""
    stop: bool = True
    """Whether training ends after the save. False: the node may be lost, and a recent checkpoint is enough."""
    deadline: float | None = None
    """When the node goes, in seconds since 1970; None: unknown."""
