"""Whether a cluster of etcd is one that a coordinator can use."""

from muster.service.etcd.client import Etcd
from muster.service.etcd.errors import TLS_FAULTS, EtcdError, TransientError

OLDEST = (3, 4)
"""The first version that tells of the errors of a member, and splits large revisions for a watch."""


def check_versions(etcd: Etcd, timeout: float) -> str:
    """See that no member is too old, and that it is not TLS that keeps all of them out of reach.

    Args:
        etcd: the client.
        timeout: seconds for each member.

    Returns:
        Why nobody can be reached now, as may pass; empty if someone can.

    Raises:
        EtcdError: one is too old, or refuses; or TLS fails with all of them.
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
    """A version's first two numbers; 0 if it is none."""
    try:
        return tuple(int(part) for part in text.split(".")[:2])
    except ValueError:
        return (0,)
