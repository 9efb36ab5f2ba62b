"""An arrival at a barrier, from when it is said to when it is decided."""

import time
from dataclasses import dataclass

from muster.v1 import session_pb2 as pb
from muster.worker.decision import Decision
from muster.worker.errors import MusterError, RefusedError
from muster.worker.groups.write_report import WriteReport

MOST_REASON_BYTES = 65_536
"""Of a vote's reason; the coordinator cuts it further."""


@dataclass(frozen=True, slots=True)
class EarlyWarning:
    """A look at a barrier that is still open, before half of its timeout has gone."""

    after: float
    """Seconds from the barrier's first arrival to the look."""
    hint: str
    """What those who wait read behind the names of the missing."""


@dataclass(slots=True)
class Pending:
    """An arrival that has no decision yet."""

    request: pb.Arrive
    timeout: float
    hint: str = ""
    """For the next warning, and no other."""
    result: Decision | MusterError | None = None
    sent_at: float | None = None
    """When it was first said on a stream, on the monotonic clock."""

    def message(self) -> pb.ConnectRequest:
        """What to say on a stream now: the arrival, and for how long it has waited already."""
        now = time.monotonic()
        if self.sent_at is None:
            self.sent_at = now
        self.request.waited_ms = round((now - self.sent_at) * 1000)
        return pb.ConnectRequest(arrive=self.request)

    def warning(self, message: str) -> str:
        """What to log when the coordinator tells how the barrier stands."""
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
    """The arrival of one rank."""
    failure = _sayable(failure) if failure is not None else None
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


def check_payload(payload: bytes, most: int | None) -> None:
    """See that a payload is not too large.

    Args:
        payload: of one rank.
        most: bytes that the coordinator takes; None: it has not said.

    Raises:
        RefusedError: it is.
    """
    if most is not None and len(payload) > most:
        raise RefusedError(
            f"a payload of {len(payload):,} bytes: the coordinator takes {most:,} from one rank "
            "(max_payload_bytes). Hand in less, or raise the limit on the coordinator.",
            "LIMIT_EXCEEDED",
        )


def _sayable(text: str) -> str:
    """Text that UTF-8 can carry (a file name may hold what it cannot), and not too long for a message."""
    data = text.encode("utf-8", "backslashreplace")
    return data[:MOST_REASON_BYTES].decode("utf-8", "ignore")
