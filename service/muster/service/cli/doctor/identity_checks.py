"""What ``muster doctor`` says of a token that an issuer signed: whose it is, and for how long."""

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
    """Whose token is shown, as it says itself; the coordinator checks it. None: it is no JWT.

    Args:
        authorization: the header that is sent.
        now: seconds since 1970; default: the system's clock.
    """
    try:
        said = jwt.decode(authorization.partition(" ")[2], options={"verify_signature": False})
        expires_at = float(said["exp"])
    except FAULTS:
        return None
    now = time.time() if now is None else now
    subject, issuer, audience = (_shown(said, claim) for claim in ("sub", "iss", "aud"))
    whose = f"the token is of {subject} by {issuer}, for the audience {audience}"
    left = expires_at - now
    if left <= 0:
        return Check(
            "identity",
            Result.FAILED,
            f"{whose}, and expired at {moment(expires_at)}",
            "see that --token-file (MUSTER_TOKEN_FILE) is the file that is rotated and no copy of it, or log "
            "in again; and compare the clocks",
        )
    return Check("identity", Result.OK, f"{whose}, and expires in {duration(round(left * 1000))}")


def _shown(said: Mapping[str, Any], claim: str) -> str:
    value = said.get(claim, "nobody")
    return report.shown(", ".join(map(str, value)) if isinstance(value, list) else str(value))
