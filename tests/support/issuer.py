"""An issuer of tokens, as a cluster's API server is one, with keys of the test's own."""

import base64
import functools
import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives import hashes, hmac, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

URL = "https://kubernetes.default.svc.cluster.local"

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey


@functools.cache
def key(name: str, kind: str = "EC") -> PrivateKey:
    """A key by its name; it takes a while to make one of RSA.

    Args:
        name: the same one gives the same key, for as long as the tests run.
        kind: ``EC``, or ``RSA``.
    """
    if kind == "RSA":
        return rsa.generate_private_key(public_exponent=65_537, key_size=2_048)
    return ec.generate_private_key(ec.SECP256R1())


def public_jwk(kid: str, private: PrivateKey) -> dict[str, Any]:
    """A key's entry in a JWKS."""
    if isinstance(private, rsa.RSAPrivateKey):
        entry = jwt.algorithms.RSAAlgorithm.to_jwk(private.public_key(), as_dict=True)
        return {**entry, "kid": kid, "use": "sig", "alg": "RS256"}
    entry = jwt.algorithms.ECAlgorithm.to_jwk(private.public_key(), as_dict=True)
    return {**entry, "kid": kid, "use": "sig", "alg": "ES256"}


def jwks(*entries: dict[str, Any]) -> bytes:
    """A key set."""
    return json.dumps({"keys": entries}).encode()


def public_pem(private: PrivateKey) -> bytes:
    """The public key, as everyone may know it."""
    return private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


class Issuer:
    """Signs tokens.

    Args:
        url: its ``iss``.
        kid: of the key that it signs with; empty: its tokens name none.
        private: that key.
    """

    def __init__(self, url: str = URL, kid: str = "first", private: PrivateKey | None = None) -> None:
        self.url = url
        self.kid = kid
        self.private = private or key(kid)

    @property
    def jwks(self) -> bytes:
        """Its key set."""
        return jwks(public_jwk(self.kid, self.private))

    def publish(self, path: Path) -> None:
        """Put its keys into a file, whole."""
        fresh = path.with_suffix(".fresh")
        fresh.write_bytes(self.jwks)
        fresh.replace(path)

    def token(
        self,
        account: str = "team-a/trainer",
        *,
        seconds: float = 600.0,
        now: float | None = None,
        headers: dict[str, Any] | None = None,
        **claims: Any,
    ) -> str:
        """A service account's token.

        Args:
            account: ``NAMESPACE/NAME``.
            seconds: until it expires.
            now: seconds since 1970; default: the system's clock.
            headers: further ones, or others.
            claims: further ones, or others; None: without it.
        """
        now = time.time() if now is None else now
        namespace, _, name = account.partition("/")
        said = {
            "iss": self.url,
            "aud": ["muster"],
            "sub": f"system:serviceaccount:{namespace}:{name}",
            "iat": now,
            "nbf": now,
            "exp": now + seconds,
            **claims,
        }
        algorithm = "RS256" if isinstance(self.private, rsa.RSAPrivateKey) else "ES256"
        return jwt.encode(
            {name: value for name, value in said.items() if value is not None},
            self.private,
            algorithm=algorithm,
            headers={**({"kid": self.kid} if self.kid else {}), **(headers or {})},
        )


def forged(header: dict[str, Any], claims: dict[str, Any], secret: bytes = b"") -> str:
    """A token that no library makes: unsigned, or signed by HMAC with any secret."""
    signed = b".".join(_base64url(json.dumps(part).encode()) for part in (header, claims))
    signature = b""
    if secret:
        mac = hmac.HMAC(secret, hashes.SHA256())
        mac.update(signed)
        signature = mac.finalize()
    return b".".join((signed, _base64url(signature))).decode()


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
