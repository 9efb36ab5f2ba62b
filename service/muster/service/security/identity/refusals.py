"""Refusals of tokens: the caller hears the message, the log also what failed and why."""

from muster.service.core.vocabulary.refusal import Reason, Refusal

UNKNOWN = (
    "the token is not one of this coordinator's, or no longer. Ask its operator for another, and put it "
    "where MUSTER_TOKEN_FILE (or --token-file) points."
)


class TokenRefused(Refusal):
    """A token was refused. No word of it is in the message, nor in what is for the log.

    Args:
        reason: the stable reason.
        message: for the caller.
        check: what failed, in a word.
        why: for the log; empty: the message.
        issuer: the name of the token's issuer; empty: it is not known to be any's.
    """

    def __init__(self, reason: Reason, message: str, *, check: str, why: str = "", issuer: str = "") -> None:
        super().__init__(reason, message)
        self.check = check
        self.why = why or message
        self.issuer = issuer


def unknown(check: str, why: str, issuer: str = "") -> TokenRefused:
    """The refusal of a token that anyone could have made: it is told no more than that.

    Args:
        check: what failed, in a word.
        why: for the log.
        issuer: the name of the issuer that it claims to be of.
    """
    return TokenRefused(Reason.TOKEN_UNKNOWN, UNKNOWN, check=check, why=why, issuer=issuer)
