"""The closed state of a run."""

from dataclasses import dataclass

from muster.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class Closed:
    """How a run was closed: for good, and by the first one who did."""

    by: str
    """Who closed it, for people."""
    reason: str
    """Why, for people; may be empty."""
    at: float
    """Seconds since 1970, on the coordinator's clock."""

    def __str__(self) -> str:
        return f"{self.by}: {self.reason}" if self.reason else self.by


def closed_from_pb(message: pb.Closed) -> Closed:
    """The coordinator's message as a :class:`Closed`."""
    return Closed(message.by, message.reason, message.closed_at.seconds + message.closed_at.nanos / 1e9)
