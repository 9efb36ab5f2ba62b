"""The notices that a run has had. A repeated notice is the request that it led to first."""

from muster.service.core.vocabulary.model import HandledNotice

MAX_NOTICES = 64
"""Number of notices that a run keeps; the oldest is dropped."""

Notices = tuple[HandledNotice, ...]


def request_of(notices: Notices, notice: str) -> int | None:
    """Return the number of the request that a notice led to; None: the run has not had it."""
    return next((one.number for one in notices if one.id == notice), None)


def with_notice(notices: Notices, notice: str, number: int) -> Notices:
    """Add the notice that led to a request. Without an id, nothing is added."""
    if not notice:
        return notices
    others = tuple(one for one in notices if one.id != notice)
    return (*others, HandledNotice(notice, number))[-MAX_NOTICES:]


def moved(notices: Notices, replaced: int, number: int) -> Notices:
    """Let the notices of a replaced request be those of its successor."""
    return tuple(one._replace(number=number) if one.number == replaced else one for one in notices)


def without_request(notices: Notices, number: int) -> Notices:
    """Forget the notices of a request that lapsed, so that they can lead to another one."""
    return tuple(one for one in notices if one.number != number)
