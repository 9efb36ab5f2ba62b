"""Checks of ``muster doctor`` for a state in etcd: one for each member."""

import time
from collections.abc import Iterator

from muster.etcd.v3 import etcd_pb2
from muster.service.cli.doctor.checks import Check, Result
from muster.service.cli.failure import Exit
from muster.service.core.vocabulary import report
from muster.service.etcd.client import Etcd
from muster.service.etcd.versions import OLDEST, parsed

SLOW = 0.1
"""Seconds for an answer above which a member counts as slow: every decision waits for several answers."""
FULL = 0.8
"""The part of its quota that a member may use without a warning."""
DEFAULT_QUOTA = 2 * 1024**3
"""Bytes. etcd reports its quota only from 3.6 on; this is its default."""


def members(etcd: Etcd, timeout: float) -> Iterator[Check]:
    """Check reachability, version, space and latency of every member.

    Args:
        etcd: the client.
        timeout: seconds that each check may take.
    """
    for endpoint in etcd.endpoints:
        begin = time.monotonic()
        status = etcd.status(endpoint, timeout)
        took = time.monotonic() - begin
        if isinstance(status, Exception):
            yield Check(
                "etcd", Result.FAILED, str(status), "see whether the member runs there", Exit.UNREACHABLE
            )
        else:
            yield member(endpoint, status, took)


def member(endpoint: str, status: etcd_pb2.StatusResponse, took: float) -> Check:
    """Check what a member reports."""
    quota = status.db_size_quota or DEFAULT_QUOTA
    leads = status.leader == status.header.member_id
    message = (
        f"{endpoint} is etcd {status.version}, {'leads' if leads else 'follows'}, uses "
        f"{_mib(status.db_size)} of {_mib(quota)}, answers in {report.seconds(took)}"
    )
    if parsed(status.version) < OLDEST:
        return Check("etcd", Result.FAILED, message, "use etcd 3.4 or newer")
    if status.errors:
        return Check(
            "etcd",
            Result.FAILED,
            f"{message}; it says: {', '.join(status.errors)}",
            "etcdctl alarm list; compact and defragment it if it has no space",
        )
    if not status.leader:
        return Check("etcd", Result.FAILED, f"{message}; it knows no leader", "bring the majority back")
    if status.db_size > FULL * quota:
        return Check(
            "etcd", Result.WARNING, message, "compact and defragment it, or raise --quota-backend-bytes"
        )
    if took > SLOW:
        return Check("etcd", Result.WARNING, message, "look at its disk and its network")
    return Check("etcd", Result.OK, message)


def _mib(size: int) -> str:
    return f"{size / 1024**2:,.1f} MiB"
