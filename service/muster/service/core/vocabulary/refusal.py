"""Refusals and their stable reasons: invariant 16 (every refusal carries a reason)."""

import enum


class Reason(enum.StrEnum):
    """Why a request was refused. The names are stable; docs/errors.md explains each."""

    INVALID_ARGUMENT = enum.auto()
    HELLO_REQUIRED = enum.auto()
    HELLO_REPEATED = enum.auto()
    PROTOCOL_VERSION = enum.auto()
    NOT_JOINED = enum.auto()
    NOT_A_PARTICIPANT = enum.auto()
    RANK_NOT_IN_SESSION = enum.auto()
    STALE_GENERATION = enum.auto()
    SUPERSEDED = enum.auto()
    SHAPE_CHANGED = enum.auto()
    SEQUENCE_AHEAD = enum.auto()
    SEQUENCE_BEHIND = enum.auto()
    SEQUENCE_FORGOTTEN = enum.auto()
    LIMIT_EXCEEDED = enum.auto()
    RUN_NOT_FOUND = enum.auto()
    BARRIER_NOT_FOUND = enum.auto()
    NO_OPEN_BARRIER = enum.auto()
    SESSION_REPLACED = enum.auto()
    RUN_CLOSED = enum.auto()
    RUN_STOPPED = enum.auto()
    RUN_FORGOTTEN = enum.auto()
    RUN_IN_USE = enum.auto()
    RENDEZVOUS_TIMED_OUT = enum.auto()
    NODE_REMOVED = enum.auto()
    NODE_NOT_NEEDED = enum.auto()
    NODE_EVICTED = enum.auto()
    NODE_NOT_FOUND = enum.auto()
    NO_SPARE = enum.auto()
    SETTINGS_DIFFER = enum.auto()
    EVICTED = enum.auto()
    MEMBER_NOT_FOUND = enum.auto()
    NO_MEMBERS = enum.auto()
    RANKS_RECONNECT = enum.auto()
    NO_SAVE_ASKED = enum.auto()
    COORDINATOR_DRAINING = enum.auto()
    NOT_LEADER = enum.auto()
    SLOW_CONSUMER = enum.auto()
    STORE_TIMED_OUT = enum.auto()
    NOT_A_NUMBER = enum.auto()
    STALE_OPERATION = enum.auto()
    ATTEMPT_SUPERSEDED = enum.auto()
    RECOVERY_SUPERSEDED = enum.auto()
    RECOVERY_MISMATCHED = enum.auto()
    KEEPER_NOT_CONNECTED = enum.auto()
    TOKEN_MISSING = enum.auto()
    TOKEN_UNKNOWN = enum.auto()
    TOKEN_EXPIRED = enum.auto()
    KEYS_UNAVAILABLE = enum.auto()
    ROLE_TOO_LOW = enum.auto()
    RUN_NOT_ALLOWED = enum.auto()
    NODE_NOT_ALLOWED = enum.auto()


class Refusal(Exception):
    """A request was not carried out, and nothing was changed by it.

    Args:
        reason: the stable reason.
        message: names the value, the reason and what to do next.
        metadata: details for programs, such as the limit's name and value.
    """

    def __init__(self, reason: Reason, message: str, **metadata: str | float) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.metadata = {key: str(value) for key, value in metadata.items()}

    def forget_origin(self) -> None:
        """Drop the traceback, before the refusal is kept as a value.

        The frames hold the refused message, such as a large payload, and often the refusal itself. That cycle
        would stay in memory until the next full garbage collection.
        """
        self.__traceback__ = self.__context__ = None


def limit_exceeded(limit: str, value: float, given: str, next_step: str = "") -> Refusal:
    """Return the refusal for a demand beyond a bound.

    Args:
        limit: the stable name of the bound.
        value: the bound.
        given: the demand, for people.
        next_step: what to do, for people; empty: the bound is one of
            :class:`~muster.service.core.vocabulary.limits.Limits`, which can be raised.
    """
    next_step = next_step or f"Lower the demand, or raise {limit} on the coordinator."
    return Refusal(
        Reason.LIMIT_EXCEEDED,
        f"{given}; the limit {limit} is {value:,}. {next_step}",
        limit=limit,
        value=value,
    )
