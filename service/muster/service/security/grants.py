"""What a caller may do: a role, for some runs, and until when."""

import enum
from dataclasses import dataclass, field

from muster.service.security.claims import Claims
from muster.service.security.patterns import matches


class Role(enum.IntEnum):
    """What a token is for; each role may do all that the ones before it may."""

    VIEWER = 1
    WORKER = 2
    OPERATOR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What the bearer of one token may do."""

    name: str
    role: Role
    runs: tuple[str, ...] = ("*",)
    """Glob patterns of run ids."""
    digest: bytes = field(repr=False)
    """SHA-256 of the token."""
    claims: Claims | None = field(default=None, repr=False, compare=False)
    """Of an issuer's token, what it was made from."""

    def allows(self, run_id: str) -> bool:
        """Whether the bearer may touch this run."""
        return matches(run_id, self.runs)

    @property
    def allows_all(self) -> bool:
        """Whether the bearer may touch every run."""
        return "*" in self.runs
