"""Bearer tokens: the roles, runs and nodes of callers, from a file.

Only digests are kept. No log, error or repr has a token.
"""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster.service.security.claims import Claims
from muster.service.security.files import FileError, read
from muster.service.security.grants import Grant, Role
from muster.service.security.identity import rules
from muster.service.security.identity.rules import Issuer, Rule
from muster.service.security.patterns import overlapping
from muster.service.security.tables import Table

MIN_TOKEN = 16
"""Characters of a token. A shorter one could be guessed."""
BEARER = "bearer"
KINDS = ("token", "issuer", "service_account", "login")
"""The kinds of tables in the file."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """All tokens of a coordinator, and the rules for tokens of issuers."""

    grants: tuple[Grant, ...]
    issuers: tuple[Issuer, ...] = ()
    rules: tuple[Rule, ...] = ()

    def find(self, token: str) -> Grant | None:
        """Return the grant of a token, in a time that does not depend on the token."""
        digest = digest_of(token)
        found = None
        for grant in self.grants:
            if hmac.compare_digest(grant.digest, digest):
                found = grant
        return found

    def rule_of(self, claims: Claims) -> Rule | None:
        """Return the first rule that covers an issuer's token."""
        if not any(issuer.issued(claims) for issuer in self.issuers):
            return None
        return next((rule for rule in self.rules if rule.covers(claims)), None)

    def of(self, claims: Claims, digest: bytes) -> Grant | None:
        """Return the grant of an issuer's token.

        Args:
            claims: the token's claims.
            digest: the token's digest.

        Returns:
            None: no rule covers the token, or its rule is for the node of a token that names no node.
        """
        rule = self.rule_of(claims)
        if rule is None:
            return None
        nodes = rule.nodes_of(claims)
        if rule.role is Role.WATCHER and not nodes:
            return None
        return Grant(
            name=claims.bearer, role=rule.role, runs=rule.runs, nodes=nodes, digest=digest, claims=claims
        )

    def overlaps(self) -> list[str]:
        """Describe the workers that may touch each other's runs by accident."""
        holders = [(f'token "{one.name}"', one.runs) for one in self.grants if one.role is Role.WORKER]
        holders += [(rule.bearers, rule.runs) for rule in self.rules if rule.role is Role.WORKER]
        return [
            f"{one} may touch runs of {other}: {pattern} and {theirs} may match the same run id. End what "
            f'comes before the asterisk with a character that no team has in its name, as in "team-a.*".'
            for one, pattern, other, theirs in overlapping(holders)
        ]

    def is_still_valid(self, grant: Grant) -> bool:
        """Return whether these tokens still give a grant."""
        if grant.claims is None:
            return grant in self.grants
        return self.of(grant.claims, grant.digest) == grant


def digest_of(token: str) -> bytes:
    """Return the SHA-256 of a token."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def bearer(authorization: str) -> str | None:
    """Return the token of a header ``Authorization: Bearer TOKEN``; None: the header has no token."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() or None if scheme.lower() == BEARER else None


def load(path: Path) -> Tokens:
    """Read a tokens file.

    Raises:
        FileError: the file cannot be read or parsed; the message names the table and the field.
    """
    data = read(path)
    try:
        document = tomllib.loads(data.decode())
    except tomllib.TOMLDecodeError as error:
        # Show only the position: the error's message may quote a token.
        place = re.search(r"\(at .*\)", str(error))
        raise FileError(f"{path} is not TOML {place[0] if place else ''}.".replace(" .", ".")) from None
    except UnicodeDecodeError:
        raise FileError(f"{path} is not in UTF-8.") from None
    if not all(key in KINDS and _is_tables(value) for key, value in document.items()):
        kinds = ", ".join(f"[[{kind}]]" for kind in KINDS)
        raise FileError(f"{path} must hold [[token]] tables and the like ({kinds}). See docs/security.md.")
    tables = {
        kind: [Table(one, f"{path}, {kind} {number}") for number, one in enumerate(document.get(kind, []), 1)]
        for kind in KINDS
    }
    grants = [_grant(table) for table in tables["token"]]
    issuers = tuple(rules.issuer(table) for table in tables["issuer"])
    _check_distinct(path, grants, issuers)
    found: list[Rule] = [rules.service_accounts(table, issuers) for table in tables["service_account"]]
    found += [rules.login(table, issuers) for table in tables["login"]]
    if not grants and not found:
        raise FileError(f"{path} holds no [[token]] table, so nobody could call. See docs/security.md.")
    return Tokens(tuple(grants), issuers, tuple(found))


def _is_tables(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _check_distinct(path: Path, grants: Sequence[Grant], issuers: Sequence[Issuer]) -> None:
    for one, other in _pairs(grants):
        if one.name == other.name or one.digest == other.digest:
            both = "name" if one.name == other.name else "token"
            raise FileError(
                f'{path}: "{one.name}" and "{other.name}" have the same {both}. Give each its own.'
            )
    for number, issuer in enumerate(issuers):
        for before in issuers[:number]:
            if issuer.name == before.name or issuer.url == before.url:
                both = "name" if issuer.name == before.name else "url"
                raise FileError(
                    f'{path}: the issuers "{before.name}" and "{issuer.name}" have the same {both}. '
                    "Give each its own."
                )


def _pairs(grants: Sequence[Grant]) -> list[tuple[Grant, Grant]]:
    by_key: dict[object, Grant] = {}
    found = []
    for grant in grants:
        for key in (grant.name, grant.digest):
            if key in by_key:
                found.append((by_key[key], grant))
            by_key[key] = grant
    return found


def _grant(table: Table) -> Grant:
    table.check_fields("name", "role", "runs", "nodes", "token", "sha256")
    name, role = table.name(), table.role()
    return Grant(name=name, role=role, runs=table.runs(), nodes=table.nodes(role), digest=_digest(table))


def _digest(table: Table) -> bytes:
    token, digest = table.said.get("token"), table.said.get("sha256")
    if (token is None) == (digest is None):
        raise FileError(f"{table.where} needs either token or sha256.")
    if token is not None:
        usable = isinstance(token, str) and len(token) >= MIN_TOKEN
        if not usable or not token.isascii() or not token.isprintable() or " " in token:
            raise FileError(
                f"{table.where}: a token is text of at least {MIN_TOKEN} ASCII characters without "
                "spaces. Make one: openssl rand -hex 32"
            )
        return hashlib.sha256(token.encode()).digest()
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise FileError(f"{table.where}: sha256 must be 64 hexadecimal digits.")
    return bytes.fromhex(digest)
