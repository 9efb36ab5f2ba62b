"""A notice that a node is about to be lost."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """A notice that a node is, or may be, about to be lost."""

    id: str
    """``SOURCE/KIND/DETAIL``, printable. The same notice has the same id after a restart of the watcher."""
    reason: str
    """The cause, for people."""
    stop: bool = True
    """Whether training ends after the save. False: a recent checkpoint is enough, as the node may survive."""
    deadline: float | None = None
    """When the node goes, in seconds since 1970; None: unknown."""
    run_id: str = ""
    """The only run that must leave the node; empty: every run on it."""
    node: str = ""
    """The node's name, as its scheduler knows it; empty: the watcher's own node."""
