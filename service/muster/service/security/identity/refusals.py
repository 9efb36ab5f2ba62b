"""Refusals of tokens. The caller gets the message; the log also gets the failed check and the reason."""

from muster.service.core.vocabulary.refusal import Reason, Refusal

UNKNOWN = (
    "the token is not one of this coordinator's, or no longer. Ask its operator for another, and put it "
    "where MUSTER_TOKEN_FILE (or --token-file) points."
)


class TokenRefused(Refusal):
    """A token was refused. Neither the message nor the log has any part of the token.

    Args:
        reason: the stable reason.
        message: for the caller.
        check: the failed check, in a word.
        why: the explanation for the log; empty: the message.
        issuer: the name of the token's issuer; empty: the issuer is unknown.
    """

    def __init__(self, reason: Reason, message: str, *, check: str, why: str = "", issuer: str = "") -> None:
        super().__init__(reason, message)
        self.check = check
        self.why = why or message
        self.issuer = issuer


def unknown(check: str, why: str, issuer: str = "") -> TokenRefused:
    """Return the refusal of a token that anyone could have made, without details for the caller.

    Args:
        check: the failed check, in a word.
        why: the explanation for the log.
        issuer: the name of the issuer that the token names.
    """
    return TokenRefused(Reason.TOKEN_UNKNOWN, UNKNOWN, check=check, why=why, issuer=issuer)
