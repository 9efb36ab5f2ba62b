"""An arrival at a barrier, until the barrier is decided."""

import time
from dataclasses import dataclass

from muster.v1 import session_pb2 as pb
from muster.worker.decision import Decision
from muster.worker.errors import MusterError, RefusedError
from muster.worker.groups.write_report import WriteReport

MAX_REASON_BYTES = 65_536
"""Limit for a vote's reason in a message; the coordinator keeps less of it."""


@dataclass(frozen=True, slots=True)
class EarlyWarning:
    """A warning about a barrier that is still open, earlier than after half of its timeout."""

    after: float
    """Seconds from the barrier's first arrival to the warning."""
    hint: str
    """What waiting ranks log after the names of the missing ranks."""


@dataclass(slots=True)
class Pending:
    """An arrival that has no decision yet."""

    request: pb.Arrive
    timeout: float
    hint: str = ""
    """For the next warning only."""
    result: Decision | MusterError | None = None
    sent_at: float | None = None
    """When it was first sent, on the monotonic clock."""

    def message(self) -> pb.ConnectRequest:
        """Return the message to send now: the arrival, and how long it has waited already."""
        now = time.monotonic()
        if self.sent_at is None:
            self.sent_at = now
        self.request.waited_ms = round((now - self.sent_at) * 1000)
        return pb.ConnectRequest(arrive=self.request)

    def warning(self, message: str) -> str:
        """Return what to log when the coordinator reports the barrier's progress."""
        hint, self.hint = self.hint, ""
        return f"{message}\n  {hint}" if hint else message


def pending(
    prefix: str,
    sequence: int,
    timeout: float,
    rank: int,
    payload: bytes,
    failure: str | None,
    early: EarlyWarning | None,
    report: WriteReport | None = None,
) -> Pending:
    """Make the arrival of one rank."""
    failure = _encodable(failure) if failure is not None else None
    request = pb.Arrive(
        prefix=prefix,
        sequence=sequence,
        timeout_ms=max(1, round(timeout * 1000)),
        arrivals=[
            pb.Arrival(
                rank=rank,
                payload=payload,
                failure=failure,
                write=report.message() if report is not None else None,
            )
        ],
        progress_after_ms=max(1, round(early.after * 1000)) if early is not None else 0,
    )
    return Pending(request, timeout, early.hint if early is not None else "")


def check_payload(payload: bytes, limit: int | None) -> None:
    """Check that a payload is not too large.

    Args:
        payload: one rank's.
        limit: bytes that the coordinator accepts; None: unknown.

    Raises:
        RefusedError: it is too large.
    """
    if limit is not None and len(payload) > limit:
        raise RefusedError(
            f"a payload of {len(payload):,} bytes: the coordinator takes {limit:,} from one rank "
            "(max_payload_bytes). Hand in less, or raise the limit on the coordinator.",
            "LIMIT_EXCEEDED",
        )


def _encodable(text: str) -> str:
    """Make text valid UTF-8, which a file name may not be, and short enough for a message."""
    data = text.encode("utf-8", "backslashreplace")
    return data[:MAX_REASON_BYTES].decode("utf-8", "ignore")
