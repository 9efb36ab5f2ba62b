"""The closed state of a run."""

from dataclasses import dataclass

from muster.v1 import common_pb2 as pb


@dataclass(frozen=True, slots=True)
class Closed:
    """How a run was closed. The first call closes it for good."""

    by: str
    """The author of the call, for people."""
    reason: str
    """Why, for people; may be empty."""
    at: float
    """Seconds since 1970, on the coordinator's clock."""

    def __str__(self) -> str:
        return f"{self.by}: {self.reason}" if self.reason else self.by


def closed_from_pb(message: pb.Closed) -> Closed:
    """Convert the coordinator's message."""
    return Closed(message.by, message.reason, message.closed_at.seconds + message.closed_at.nanos / 1e9)
