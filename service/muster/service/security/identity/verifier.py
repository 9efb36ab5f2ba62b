"""The check of an issuer's token, from its text to its claims."""

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jwt

from muster.client.protocol import MAX_TOKEN
from muster.service.core.vocabulary import report
from muster.service.core.vocabulary.refusal import Reason
from muster.service.security.claims import Claims, moment
from muster.service.security.identity.fetching import fetch
from muster.service.security.identity.jwks import ALGORITHMS, Key
from muster.service.security.identity.keys import FetchedKeys, Keys, KeysInFile, KeysUnavailable, KeyUnknown
from muster.service.security.identity.refusals import TokenRefused, unknown
from muster.service.security.identity.rules import FetchedFrom, Issuer

SHAPE = re.compile(r"[\w-]+\.[\w-]+\.[\w-]*", re.ASCII)
"""Three parts in base64url. A token without a signature matches as well: it has its own refusal."""
FAULTS = (jwt.PyJWTError, ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""Exceptions of parsing untrusted tokens."""
MAX_REMEMBERED = 4_096
"""Tokens with a verified signature. A check takes up to a millisecond, and clients show a token often."""


@dataclass(frozen=True, slots=True)
class _Known:
    issuer: Issuer
    keys: Keys


@dataclass(frozen=True, slots=True)
class _Good:
    """A verified token: its issuer, its key and its claims."""

    known: _Known
    kid: str | None
    key: Key
    claims: Claims


class Verifier:
    """Checks the tokens of known issuers.

    Args:
        clock: seconds since 1970.
        ticks: seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float], ticks: Callable[[], float]) -> None:
        self._clock = clock
        self._ticks = ticks
        self._known: dict[str, _Known] = {}
        self._good: dict[bytes, _Good] = {}

    def set_issuers(self, issuers: Iterable[Issuer]) -> None:
        """Accept the tokens of these issuers from now on, and of no others.

        Raises:
            FileError: a file of keys cannot be used; then nothing changes.
        """
        before = self._known
        now = {}
        for one in issuers:
            same = before.get(one.url)
            now[one.url] = same if same is not None and same.issuer == one else _Known(one, self._open(one))
        self._known = now
        for url, known in before.items():
            if now.get(url) is not known:
                known.keys.close()

    def _open(self, issuer: Issuer) -> Keys:
        source = issuer.keys
        if not isinstance(source, FetchedFrom):
            return KeysInFile(source)
        return FetchedKeys(issuer.name, source.url, partial(fetch, source), self._ticks)

    def refresh(self) -> None:
        """Load or fetch keys again if that is due; called about every second."""
        for known in self._known.values():
            known.keys.refresh()

    def close(self) -> None:
        """Cancel fetches in progress."""
        for known in self._known.values():
            known.keys.close()

    async def verify(self, token: str) -> Claims:
        """Verify a token, and return its claims.

        Raises:
            TokenRefused: the token is not valid.
        """
        digest = hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
        good = self._good.pop(digest, None)
        if good is None or not self._is_current(good):
            good = await self._examine(token)
        self._check_times(good.claims)
        # The most recent token is the last.
        self._good[digest] = good
        if len(self._good) > MAX_REMEMBERED:
            del self._good[next(iter(self._good))]
        return good.claims

    def _is_current(self, good: _Good) -> bool:
        """Return whether the issuer is unchanged and still has the key."""
        known = good.known
        return self._known.get(known.issuer.url) is known and known.keys.known(good.kid) == good.key

    async def _examine(self, token: str) -> _Good:
        header, said = _read(token)
        known = self._known.get(url) if isinstance(url := said.get("iss"), str) else None
        if known is None:
            shown = report.shown(str(said.get("iss"))[:200])
            raise unknown("issuer", f"its issuer (iss) is {shown}, and no [[issuer]] has that url")
        kid = header.get("kid")
        if kid is not None and not isinstance(kid, str):
            raise unknown("kid", "its key id is no text", known.issuer.name)
        key = await _key(known, kid)
        if self._known.get(known.issuer.url) is not known:
            raise unknown("issuer", "its [[issuer]] was changed while a key was fetched", known.issuer.name)
        return _Good(known, kid, key, _signed(token, key, known.issuer))

    def _check_times(self, claims: Claims) -> None:
        now = self._clock()
        if now >= claims.ends_at:
            raise expired(claims, now)
        leeway = claims.ends_at - claims.expires_at
        for field in ("nbf", "iat"):
            begins = claims.said.get(field)
            if begins is None:
                continue
            if not _is_number(begins):
                raise unknown(field, f"its {field} is no number", claims.issuer)
            if begins - leeway > now:
                raise TokenRefused(
                    Reason.TOKEN_UNKNOWN,
                    f"the token of {claims.bearer} is not valid before {moment(begins)}, and "
                    f"here it is {moment(now)}. Compare the clocks of the coordinator and of the issuer.",
                    check=field,
                    issuer=claims.issuer,
                )


def expired(claims: Claims, now: float) -> TokenRefused:
    """Return the refusal of a verified token that has expired.

    Args:
        claims: the token's claims.
        now: seconds since 1970.
    """
    return TokenRefused(
        Reason.TOKEN_EXPIRED,
        f"the token of {claims.bearer} expired {report.seconds(max(0.0, now - claims.expires_at))} ago, at "
        f"{claims.expiry}, and this one is shown still: it was not rotated. See that "
        "MUSTER_TOKEN_FILE (or --token-file) is the file that is rotated, such as a projected volume's, and "
        "no copy of it.",
        check="exp",
        issuer=claims.issuer,
    )


def _read(token: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Header and claims of a token, unchecked."""
    if len(token) > MAX_TOKEN:
        raise unknown("size", f"it has {len(token):,} characters, and {MAX_TOKEN:,} are the most")
    if SHAPE.fullmatch(token) is None:
        raise unknown("shape", "it is not a token of the file, and not a JWT")
    try:
        read = jwt.decode_complete(token, options={"verify_signature": False})
        header, said = read["header"], read["payload"]
    except FAULTS as error:
        raise unknown("shape", f"it cannot be read as a JWT ({type(error).__name__})") from None
    if header.get("alg") not in ALGORITHMS.values():
        raise unknown(
            "alg", f"it is signed with {report.shown(str(header.get('alg'))[:20])}, not RS256 or ES256"
        )
    return header, said


async def _key(known: _Known, kid: str | None) -> Key:
    name = known.issuer.name
    try:
        return await known.keys.find(kid)
    except KeyUnknown as error:
        raise unknown("kid", str(error), name) from None
    except KeysUnavailable as error:
        raise TokenRefused(
            Reason.KEYS_UNAVAILABLE,
            f'the coordinator cannot check this token now: the keys of the issuer "{name}", or its newest, '
            "cannot be had. Its log says why, and it tries again by itself; so may you.",
            check="keys",
            why=str(error),
            issuer=name,
        ) from None


def _signed(token: str, key: Key, issuer: Issuer) -> Claims:
    """Verify signature, issuer and audience of a token, but not its times, and return its claims."""
    try:
        said = jwt.decode(
            token,
            key.public,
            algorithms=[key.algorithm],
            audience=issuer.audience,
            issuer=issuer.url,
            options={
                "require": ["exp", "iss", "aud", "sub"],
                "verify_exp": False,
                "verify_nbf": False,
                "verify_iat": False,
            },
        )
    except jwt.InvalidAudienceError:
        raise TokenRefused(
            Reason.TOKEN_UNKNOWN,
            f'the token is for another audience than "{issuer.audience}". Ask for one with that audience: '
            f"audience: {issuer.audience} in a projected volume's serviceAccountToken.",
            check="aud",
            issuer=issuer.name,
        ) from None
    except jwt.MissingRequiredClaimError as error:
        raise unknown(error.claim, f"it has no {error.claim}", issuer.name) from None
    except jwt.InvalidAlgorithmError:
        raise unknown("alg", f"its key is for {key.algorithm}, and it names another", issuer.name) from None
    except jwt.InvalidSignatureError:
        raise unknown("signature", "its signature is not of the key that it names", issuer.name) from None
    except FAULTS as error:
        raise unknown("claims", f"its claims cannot be used ({type(error).__name__})", issuer.name) from None
    expires_at = said["exp"]
    if not _is_number(expires_at):
        raise unknown("exp", "its exp is no number", issuer.name)
    return Claims(issuer=issuer.name, said=said, expires_at=expires_at, ends_at=expires_at + issuer.leeway)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
