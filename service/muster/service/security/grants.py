"""The rights of a caller: a role, and the runs and nodes that it is for."""

import enum
from dataclasses import dataclass, field

from muster.service.security.claims import Claims
from muster.service.security.patterns import matches


class Role(enum.IntEnum):
    """The role of a token. Each role includes the ones before it. The protocol has numbers of its own."""

    VIEWER = 1
    WATCHER = 2
    WORKER = 3
    OPERATOR = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The rights of the bearer of one token."""

    name: str
    role: Role
    runs: tuple[str, ...] = ("*",)
    """Glob patterns of run ids."""
    nodes: tuple[str, ...] = ()
    """Glob patterns of node names, for a watcher."""
    digest: bytes = field(repr=False)
    """SHA-256 of the token."""
    claims: Claims | None = field(default=None, repr=False, compare=False)
    """The claims of an issuer's token; None: the tokens file has the token itself."""

    def allows(self, run_id: str) -> bool:
        """Return whether the bearer may touch this run."""
        return matches(run_id, self.runs)

    def allows_node(self, name: str) -> bool:
        """Return whether the bearer may drain this node: a watcher its own nodes, a higher role any node."""
        if self.role > Role.WATCHER:
            return True
        return bool(name) and name.isprintable() and matches(name, self.nodes)

    @property
    def allows_all(self) -> bool:
        """Whether the bearer may touch every run."""
        return "*" in self.runs
