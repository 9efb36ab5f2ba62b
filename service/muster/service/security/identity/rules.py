"""The issuers in the tokens file, and the rules for the bearers of their tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from urllib.parse import urlsplit

from muster.service.address import Address
from muster.service.security.claims import Claims
from muster.service.security.files import FileError
from muster.service.security.grants import Role
from muster.service.security.patterns import literal
from muster.service.security.tables import Table

AUDIENCE = "muster"
LEEWAY = 10.0
"""Seconds by which the issuer's clock and ours may differ."""
MAX_LEEWAY = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedFrom:
    """Keys that are fetched over HTTP."""

    url: str
    ca_file: Path | None = None
    """The authorities of the server's certificate; None: the system's authorities."""
    token_file: Path | None = None
    """The file of the token for that server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """An issuer of tokens, and how to check them."""

    name: str
    url: str
    """The ``iss`` of its tokens, to the letter."""
    audience: str = AUDIENCE
    keys: Path | FetchedFrom
    """The source of its public keys, a JWKS."""
    leeway: float = LEEWAY
    """Seconds."""

    def issued(self, claims: Claims) -> bool:
        """Return whether a verified token is of this issuer and for this audience."""
        audience = claims.said["aud"]
        return (
            claims.issuer == self.name
            and claims.said["iss"] == self.url
            and (audience == self.audience or (isinstance(audience, list) and self.audience in audience))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAccounts:
    """A rule for service accounts of Kubernetes."""

    issuer: str
    namespace: str
    """A glob pattern, as is ``account``."""
    account: str
    role: Role
    runs: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    """Glob patterns of a watcher's nodes; empty: the node that the token names."""

    @property
    def bearers(self) -> str:
        """The covered bearers, for people."""
        return f"service accounts {self.namespace}/{self.account}"

    def covers(self, claims: Claims) -> bool:
        """Return whether this rule covers the bearer of a token."""
        account = claims.account
        return (
            claims.issuer == self.issuer
            and account is not None
            and fnmatchcase(account.namespace, self.namespace)
            and fnmatchcase(account.name, self.account)
        )

    def nodes_of(self, claims: Claims) -> tuple[str, ...]:
        """Return the patterns of the nodes that the bearer of a covered token may drain."""
        if self.role is not Role.WATCHER or self.nodes or claims.node is None:
            return self.nodes
        return (literal(claims.node),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """A rule for people, or other subjects of an OpenID issuer."""

    issuer: str
    claims: Mapping[str, str]
    """Claims that the token must have, all of them."""
    role: Role
    runs: tuple[str, ...]
    nodes: tuple[str, ...] = ()
    """Glob patterns of a watcher's nodes."""

    @property
    def bearers(self) -> str:
        """The covered bearers, for people."""
        return "logins with " + ", ".join(f"{name} = {value}" for name, value in self.claims.items())

    def covers(self, claims: Claims) -> bool:
        """Return whether this rule covers the bearer of a token."""
        return claims.issuer == self.issuer and all(claims.holds(*one) for one in self.claims.items())

    def nodes_of(self, claims: Claims) -> tuple[str, ...]:
        """Return the patterns of the nodes that the bearer of a covered token may drain."""
        return self.nodes


Rule = ServiceAccounts | Login


def issuer(table: Table) -> Issuer:
    """Read an ``[[issuer]]`` table.

    Raises:
        FileError: the table is invalid.
    """
    table.check_fields("name", "url", "audience", "keys_file", "keys_url", "ca_file", "token_file", "leeway")
    name = table.name()
    url = table.text("url", "the iss of its tokens, to the letter")
    leeway = table.number("leeway", LEEWAY, maximum=MAX_LEEWAY)
    keys_file, keys_url = table.path("keys_file"), table.optional_text("keys_url")
    if (keys_file is None) == (keys_url is None):
        raise FileError(f"{table.where} needs either keys_file or keys_url: where its public keys are.")
    keys: Path | FetchedFrom
    if keys_file is not None:
        for field in ("ca_file", "token_file"):
            if table.path(field) is not None:
                raise FileError(f"{table.where}: {field} is for keys_url, and it has keys_file.")
        keys = keys_file
    else:
        keys = FetchedFrom(
            url=_keys_url(keys_url or "", table.where),
            ca_file=table.path("ca_file"),
            token_file=table.path("token_file"),
        )
    audience = table.optional_text("audience") or AUDIENCE
    return Issuer(name=name, url=url, audience=audience, keys=keys, leeway=leeway)


def _keys_url(url: str, where: str) -> str:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("https", "http") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise FileError(f"{where}: keys_url must be such as https://kubernetes.default.svc/openid/v1/jwks.")
    if parts.scheme == "http" and not Address(parts.hostname or "", 0).is_loopback:
        raise FileError(
            f"{where}: keys_url must be https: who is on the way could put keys of their own in its place."
        )
    return url


def service_accounts(table: Table, issuers: tuple[Issuer, ...]) -> ServiceAccounts:
    """Read a ``[[service_account]]`` table.

    Raises:
        FileError: the table is invalid.
    """
    table.check_fields("issuer", "namespace", "account", "role", "runs", "nodes")
    role = table.role()
    return ServiceAccounts(
        issuer=_issuer_of(table, issuers),
        namespace=table.text("namespace", 'a namespace, or a pattern such as "team-*"'),
        account=table.text("account", 'the name of a service account, or a pattern such as "*"'),
        role=role,
        runs=table.runs(),
        nodes=table.nodes(role, required=False),
    )


def login(table: Table, issuers: tuple[Issuer, ...]) -> Login:
    """Read a ``[[login]]`` table.

    Raises:
        FileError: the table is invalid.
    """
    table.check_fields("issuer", "claims", "role", "runs", "nodes")
    role = table.role()
    return Login(
        issuer=_issuer_of(table, issuers),
        claims=table.texts("claims", '{ groups = "ml-operators" }'),
        role=role,
        runs=table.runs(),
        nodes=table.nodes(role),
    )


def _issuer_of(table: Table, issuers: tuple[Issuer, ...]) -> str:
    names = [one.name for one in issuers]
    given = table.optional_text("issuer")
    if not names:
        raise FileError(f"{table.where} needs an [[issuer]] table: who signs its tokens.")
    if given is None and len(names) == 1:
        return names[0]
    if given not in names:
        raise FileError(f"{table.where} needs an issuer: one of {', '.join(names)}.")
    return given
