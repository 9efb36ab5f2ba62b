"""An issuer's public keys: a JSON Web Key Set (RFC 7517)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

MIN_RSA_BITS = 2_048
ALGORITHMS: Mapping[tuple[Any, Any], str] = {("RSA", None): "RS256", ("EC", "P-256"): "ES256"}
"""The algorithm of a key, by its kind and curve. The algorithm in a token is never trusted."""


@dataclass(frozen=True, slots=True)
class Key:
    """A public key and its only algorithm."""

    public: RSAPublicKey | EllipticCurvePublicKey
    algorithm: str


@dataclass(frozen=True, slots=True)
class KeySet:
    """The current keys of an issuer."""

    keys: tuple[tuple[str | None, Key], ...]
    """Ids and keys."""

    def find(self, kid: str | None) -> Key | None:
        """Return the key with an id. Without an id, it is the only key of the set, if there is only one.

        Args:
            kid: the key id in a token; None: the token has no key id.
        """
        if kid is None:
            return self.keys[0][1] if len(self.keys) == 1 else None
        return next((key for known, key in self.keys if known == kid), None)

    @property
    def ids(self) -> frozenset[str | None]:
        """The ids of all keys."""
        return frozenset(kid for kid, _ in self.keys)


def parse(data: bytes) -> KeySet:
    """Parse the usable keys of a key set.

    Raises:
        ValueError: it has no usable key, or is not a key set. The message is the end of a sentence.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON" if data.strip() else "it is empty") from None
    entries = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise ValueError('it is not a JWKS: an object with the list "keys"')
    keys = tuple(key for entry in entries if (key := _key(entry)) is not None)
    if not keys:
        raise ValueError(
            f"none of its {len(entries)} keys is for signatures with RS256 (RSA of {MIN_RSA_BITS} bits or "
            "more) or ES256 (EC P-256)"
        )
    return KeySet(keys)


def _key(entry: object) -> tuple[str | None, Key] | None:
    if not isinstance(entry, dict) or entry.get("use", "sig") != "sig":
        return None
    if "d" in entry:
        raise ValueError("it holds a private key: give the public keys alone")
    try:
        algorithm = ALGORITHMS.get((entry.get("kty"), entry.get("crv")))
        if algorithm is None or entry.get("alg", algorithm) != algorithm:
            return None
        public = jwt.PyJWK(entry, algorithm=algorithm).key
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, AttributeError):
        return None
    if isinstance(public, RSAPublicKey) and public.key_size < MIN_RSA_BITS:
        return None
    kid = entry.get("kid")
    return (kid if isinstance(kid, str) else None, Key(public, algorithm))
