"""The notices that a run has had. A repeated notice leads to no second request."""

from muster.service.core.vocabulary.model import HandledNotice

MAX_NOTICES = 1_024
"""Number of notices that a run keeps. When another one comes, the least recently heard one is dropped."""

STOP = "stop "
"""Prefix of the keys of notices that ask for the end of training."""

Notices = tuple[HandledNotice, ...]


def key_of(notice: str, *, stop: bool) -> str:
    """Return the key of a notice. A notice to stop and one to save are different notices.

    Args:
        notice: the id of the notice, or empty.
        stop: whether training ends after the save.
    """
    return f"{STOP if stop else 'save '}{notice}" if notice else ""


def key_on_node(notice: str, node_name: str) -> str:
    """Return the id of a notice about a node. The same notice about another node has another id."""
    return f"{node_name}: {notice}" if notice else ""


def request_of(notices: Notices, notice: str) -> int | None:
    """Return the number of the request that a notice led to; None: the run has not had the notice."""
    return next((one.number for one in notices if one.id == notice), None)


def with_notice(notices: Notices, notice: str, number: int) -> Notices:
    """Add the notice that led to a request. Without an id, nothing is added."""
    if not notice:
        return notices
    others = tuple(one for one in notices if one.id != notice)
    return (*others, HandledNotice(notice, number))[-MAX_NOTICES:]


def moved(notices: Notices, replaced: int, number: int) -> Notices:
    """Assign the notices of a replaced request to its successor."""
    return tuple(one._replace(number=number) if one.number == replaced else one for one in notices)


def without_request(notices: Notices, number: int) -> Notices:
    """Forget the notices of a request that lapsed, so that they can lead to another one."""
    return tuple(one for one in notices if one.number != number)


def of_covered(notices: Notices, lapsed: int, number: int) -> Notices:
    """Forget the notices to stop of a request that lapsed. Those to save go on with the one that it covered.

    Args:
        notices: all notices.
        lapsed: the number of the request that lapsed.
        number: that of the request that goes on.
    """
    kept = tuple(one for one in notices if one.number != lapsed or not one.id.startswith(STOP))
    return moved(kept, lapsed, number)
