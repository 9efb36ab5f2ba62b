"""The rights of a caller: a role, and the runs that it is for."""

import enum
from dataclasses import dataclass, field

from muster.service.security.claims import Claims
from muster.service.security.patterns import matches


class Role(enum.IntEnum):
    """The role of a token. Each role includes the ones before it."""

    VIEWER = 1
    WORKER = 2
    OPERATOR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The rights of the bearer of one token."""

    name: str
    role: Role
    runs: tuple[str, ...] = ("*",)
    """Glob patterns of run ids."""
    digest: bytes = field(repr=False)
    """SHA-256 of the token."""
    claims: Claims | None = field(default=None, repr=False, compare=False)
    """The claims of an issuer's token; None: the tokens file has the token itself."""

    def allows(self, run_id: str) -> bool:
        """Return whether the bearer may touch this run."""
        return matches(run_id, self.runs)

    @property
    def allows_all(self) -> bool:
        """Whether the bearer may touch every run."""
        return "*" in self.runs
