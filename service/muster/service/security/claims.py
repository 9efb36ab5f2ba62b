"""The claims of a verified token."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from muster.service.core.vocabulary import report

SERVICE_ACCOUNT = ["system", "serviceaccount"]
"""The ``sub`` of a service account begins so."""


class Account(NamedTuple):
    """A service account of Kubernetes."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """A token's claims, after a check of its signature, issuer, audience and times."""

    issuer: str
    """The issuer's name in the tokens file."""
    said: Mapping[str, Any] = field(repr=False)
    expires_at: float
    """Seconds since 1970, as the token says."""
    ends_at: float
    """The same, with the issuer's leeway."""

    @property
    def account(self) -> Account | None:
        """The service account of the token; None: the token is not of a service account."""
        parts = str(self.said["sub"]).split(":")
        if len(parts) != 4 or parts[:2] != SERVICE_ACCOUNT or not all(parts):
            return None
        return Account(*parts[2:])

    @property
    def bearer(self) -> str:
        """The bearer of the token, for people."""
        if (account := self.account) is not None:
            return report.shown(f"{account.namespace}/{account.name}")
        return report.shown(str(self.said["sub"]))

    @property
    def node(self) -> str | None:
        """The node of the pod that the token was made for; None: the token names no node.

        Kubernetes names it from version 1.30 on.
        """
        bound = self.said.get("kubernetes.io")
        node = bound.get("node") if isinstance(bound, Mapping) else None
        name = node.get("name") if isinstance(node, Mapping) else None
        return name if isinstance(name, str) and name and name.isprintable() else None

    def holds(self, claim: str, value: str) -> bool:
        """Return whether a claim is this text, or a list with it."""
        said = self.said.get(claim)
        if claim == "email" and self.said.get("email_verified", True) is not True:
            # The issuer did not verify the address that the user gave.
            return False
        return said == value or (isinstance(said, list) and value in said)

    @property
    def expiry(self) -> str:
        """The time at which the token expires, for people."""
        return moment(self.expires_at)


def moment(seconds: float) -> str:
    """Format a time for people.

    Args:
        seconds: seconds since 1970.
    """
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return "a time beyond the calendar"
