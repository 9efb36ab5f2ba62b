"""Bearer tokens: who may call, in which role and for which runs, as a file says.

Only digests are kept. No token is in a log, an error or a repr.
"""

import enum
import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muster.service.security.files import FileError, read
from muster.service.security.patterns import matches

LEAST_TOKEN = 16
"""Characters of a token: fewer could be guessed."""
BEARER = "bearer"


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

    def allows(self, run_id: str) -> bool:
        """Whether the bearer may touch this run."""
        return matches(run_id, self.runs)

    @property
    def allows_all(self) -> bool:
        """Whether the bearer may touch every run."""
        return "*" in self.runs


@dataclass(frozen=True, slots=True)
class Tokens:
    """All tokens of a coordinator."""

    grants: tuple[Grant, ...]

    def find(self, token: str) -> Grant | None:
        """The grant of a token; how long it takes does not tell how near the token is to one."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        found = None
        for grant in self.grants:
            if hmac.compare_digest(grant.digest, digest):
                found = grant
        return found


def bearer(authorization: str) -> str | None:
    """The token in a header ``Authorization: Bearer TOKEN``; None if it holds none."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() or None if scheme.lower() == BEARER else None


def load(path: Path) -> Tokens:
    """Read a tokens file.

    Raises:
        FileError: it cannot be read or understood; the message names the table and the field.
    """
    data = read(path)
    try:
        document = tomllib.loads(data.decode())
    except tomllib.TOMLDecodeError as error:
        # Its message may quote what stands there, which may be a token: only the place is told.
        place = re.search(r"\(at .*\)", str(error))
        raise FileError(f"{path} is not TOML {place[0] if place else ''}.".replace(" .", ".")) from None
    except UnicodeDecodeError:
        raise FileError(f"{path} is not in UTF-8.") from None
    unknown = document.keys() - {"token"}
    tables = document.get("token", [])
    if unknown or not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise FileError(f"{path} must hold [[token]] tables and nothing else. See docs/security.md.")
    grants = [_grant(table, f"{path}, token {number}") for number, table in enumerate(tables, 1)]
    if not grants:
        raise FileError(f"{path} holds no [[token]] table, so nobody could call. See docs/security.md.")
    for one, other in _pairs(grants):
        if one.name == other.name or one.digest == other.digest:
            both = "name" if one.name == other.name else "token"
            raise FileError(
                f'{path}: "{one.name}" and "{other.name}" have the same {both}. Give each its own.'
            )
    return Tokens(tuple(grants))


def _pairs(grants: list[Grant]) -> list[tuple[Grant, Grant]]:
    by_key: dict[object, Grant] = {}
    found = []
    for grant in grants:
        for key in (grant.name, grant.digest):
            if key in by_key:
                found.append((by_key[key], grant))
            by_key[key] = grant
    return found


def _grant(table: Mapping[str, Any], where: str) -> Grant:
    unknown = table.keys() - {"name", "role", "runs", "token", "sha256"}
    if unknown:
        # A name that is not known may be a token that was put in the wrong place.
        raise FileError(
            f"{where} has {len(unknown)} unknown fields: name, role, runs, token, sha256 are known."
        )
    name, role = table.get("name"), table.get("role")
    runs = table.get("runs", ["*"])
    if not isinstance(name, str) or not name or not name.isprintable():
        raise FileError(f"{where} needs a name: printable text, which is shown in refusals.")
    if not isinstance(role, str) or role.upper() not in Role.__members__:
        roles = ", ".join(one.name.lower() for one in Role)
        raise FileError(f'{where} ("{name}") needs a role: one of {roles}.')
    if not isinstance(runs, list) or not runs or not all(isinstance(one, str) and one for one in runs):
        raise FileError(f'{where} ("{name}"): runs must be a list of patterns, such as ["team-a-*"].')
    return Grant(name=name, role=Role[role.upper()], runs=tuple(runs), digest=_digest(table, where, name))


def _digest(table: Mapping[str, Any], where: str, name: str) -> bytes:
    token, digest = table.get("token"), table.get("sha256")
    if (token is None) == (digest is None):
        raise FileError(f'{where} ("{name}") needs either token or sha256.')
    if token is not None:
        usable = isinstance(token, str) and len(token) >= LEAST_TOKEN
        if not usable or not token.isascii() or not token.isprintable() or " " in token:
            raise FileError(
                f'{where} ("{name}"): a token is text of at least {LEAST_TOKEN} ASCII characters without '
                "spaces. Make one: openssl rand -hex 32"
            )
        return hashlib.sha256(token.encode()).digest()
    if not isinstance(digest, str) or not re.fullmatch(r"[0-9a-fA-F]{64}", digest):
        raise FileError(f'{where} ("{name}"): sha256 must be 64 hexadecimal digits.')
    return bytes.fromhex(digest)
