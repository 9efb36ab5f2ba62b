"""The check that a coordinator can use a cluster of etcd."""

from muster.service.etcd.client import Etcd
from muster.service.etcd.errors import TLS_FAULTS, EtcdError, TransientError

OLDEST = (3, 4)
"""The first version that reports the errors of a member, and splits large revisions for a watch."""


def check_versions(etcd: Etcd, timeout: float) -> str:
    """Check that no member is too old, and that TLS does not fail with all of them.

    Args:
        etcd: the client.
        timeout: seconds for each member.

    Returns:
        Why no member is reachable at present; empty: a member is.

    Raises:
        EtcdError: a member is too old or refuses; or TLS fails with all members.
    """
    silent: list[str] = []
    for endpoint, status in etcd.statuses(timeout).items():
        if isinstance(status, EtcdError):
            raise status
        if isinstance(status, TransientError):
            silent.append(str(status))
        elif parsed(status.version) < OLDEST:
            raise EtcdError(f"{endpoint} is etcd {status.version}; 3.4 is the oldest that Muster can use")
    if len(silent) == len(etcd.endpoints):
        if all(any(sentence in why for _, sentence in TLS_FAULTS) for why in silent):
            raise EtcdError("; ".join(silent))
        return "; ".join(silent)
    return ""


def parsed(text: str) -> tuple[int, ...]:
    """Return a version's first two numbers; 0: the text is not a version."""
    try:
        return tuple(int(part) for part in text.split(".")[:2])
    except ValueError:
        return (0,)
