"""The check of ``muster doctor`` for a token that an issuer signed: its subject and its expiry."""

import time
from collections.abc import Mapping
from typing import Any

import jwt

from muster.service.cli.doctor.checks import Check, Result
from muster.service.core.vocabulary import report
from muster.service.formatting.cells import duration
from muster.service.security.claims import moment

FAULTS = (jwt.PyJWTError, ValueError, TypeError, KeyError, OverflowError, RecursionError)


def identity(authorization: str, now: float | None = None) -> Check | None:
    """Check the claims of a JWT, without its signature, which the coordinator checks.

    Args:
        authorization: the header that is sent.
        now: seconds since 1970; default: the system's clock.

    Returns:
        The check; None if the token is not a JWT.
    """
    try:
        said = jwt.decode(authorization.partition(" ")[2], options={"verify_signature": False})
        expires_at = float(said["exp"])
    except FAULTS:
        return None
    now = time.time() if now is None else now
    subject, issuer, audience = (_shown(said, claim) for claim in ("sub", "iss", "aud"))
    holder = f"the token is of {subject} by {issuer}, for the audience {audience}"
    left = expires_at - now
    if left <= 0:
        return Check(
            "identity",
            Result.FAILED,
            f"{holder}, and expired at {moment(expires_at)}",
            "see that --token-file (MUSTER_TOKEN_FILE) is the rotated file and not a copy of it, or log "
            "in again; and compare the clocks",
        )
    return Check("identity", Result.OK, f"{holder}, and expires in {duration(round(left * 1000))}")


def _shown(said: Mapping[str, Any], claim: str) -> str:
    value = said.get(claim, "nobody")
    return report.shown(", ".join(map(str, value)) if isinstance(value, list) else str(value))
